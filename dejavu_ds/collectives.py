"""Communication between tensor-parallel ranks, through deepspeed.comm on the group DeepSpeed made."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator


@dataclass(frozen=True)
class TensorParallel:
    """One rank's view of the tensor-parallel group; at size 1 every call is a no-op and no group exists.

    `all_reduce` is used and not `inference_all_reduce`, whose shared-memory form for CPUs ignores the group.
    """

    group: Any = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Any) -> "TensorParallel":
        """The view for DeepSpeed's model-parallel group; None stands for a single rank."""
        if group is None:
            return cls()
        return cls(group, dist.get_rank(group=group), dist.get_world_size(group=group))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; every rank ends with the same bits."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's value on every rank, in place."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self.group)
        return x

    def offset(self, local: int, device: torch.device) -> int:
        """Where this rank's `local` rows start when shards lie in rank order; shards may be uneven."""
        if self.size == 1:
            return 0
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = local
        return int(self.all_reduce(sizes)[: self.rank].sum())


@contextmanager
def no_compilation() -> Iterator[None]:
    """While DeepSpeed sets up its communication, keep it from compiling a C++ extension on CPU-only machines.

    Its backend builds a shared-memory reduction for `inference_all_reduce` there, which takes minutes, needs a
    compiler and is never called by us; without it everything goes through gloo.
    """
    # By name, since the attribute `torch` of deepspeed.comm is torch itself.
    backend = importlib.import_module("deepspeed.comm.torch")
    if get_accelerator().device_name() != "cpu" or not hasattr(backend, "build_shm_op"):
        yield
        return
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        yield
    finally:
        backend.build_shm_op = build


def init_distributed() -> None:
    """Join the job's process group as DeepSpeed does, without its compilation; harmless if already done."""
    # NCCL works on the current device, and the launcher hides no GPU from a rank.
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with no_compilation():
        deepspeed.init_distributed()
