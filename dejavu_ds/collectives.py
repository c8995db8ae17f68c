"""Communication between tensor-parallel ranks, through deepspeed.comm on the group DeepSpeed made."""

import importlib
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from dejavu_ds.kernels.configs import SUMMED_PARTS

# A sum of more tokens is no longer bound by latency.
_ONE_SHOT_TOKENS = 16


@dataclass(frozen=True)
class TensorParallel:
    """One rank's view of the tensor-parallel group; at size 1 every call is a no-op and no group exists.

    `all_reduce` is used and not `inference_all_reduce`, whose shared-memory form for CPUs ignores the group.
    """

    group: Any = None
    rank: int = 0
    size: int = 1
    one_shot: "OneShotSum | None" = None

    @classmethod
    def of(cls, group: Any) -> "TensorParallel":
        """The view for DeepSpeed's model-parallel group; None stands for a single rank."""
        if group is None:
            return cls()
        return cls(group, dist.get_rank(group=group), dist.get_world_size(group=group))

    def with_one_shot(self, width: int, device: torch.device) -> "TensorParallel":
        """The same, with a faster sum of decode steps' parts [S, B, width] where the GPUs allow it; collective.

        Where they do not, a warning says why, and everything goes through NCCL; as it does between hosts.
        """
        if self.size == 1 or device.type != "cuda" or _local_ranks(self.size) < self.size:
            return self
        problem = ""
        try:
            one_shot = OneShotSum(self.group, SUMMED_PARTS * _ONE_SHOT_TOKENS * width, device)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        # All ranks or none: a sum that only some take would wait for ever.
        failures = self.all_reduce(torch.tensor([float(bool(problem))], device=device))
        if failures.item():
            reason = problem or "not on every rank"
            warnings.warn(f"sums between GPUs go through NCCL, not symmetric memory: {reason}", stacklevel=2)
            return self
        return replace(self, one_shot=one_shot)

    def partial(self, B: int, D: int, device: torch.device) -> torch.Tensor | None:
        """Where this rank's share of a decode step's result [B, D] goes, in parts [S, B, D] fp32: for `sum_partial`.

        None at size 1.
        """
        if self.size == 1:
            return None
        # A CPU's way has one part.
        shape = SUMMED_PARTS if device.type == "cuda" else 1, B, D
        part = None if self.one_shot is None else self.one_shot.part(*shape)
        return torch.empty(shape, dtype=torch.float32, device=device) if part is None else part

    def sum_partial(self, y: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of what was written to `partial`; the same bits on every rank."""
        if self.one_shot is not None and self.one_shot.holds(y):
            return self.one_shot(y)
        return self.all_reduce(y)

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


def _local_ranks(size: int) -> int:
    """Ranks of the job on this host, as the launcher (DeepSpeed's or torch's) says; `size` where none does."""
    return int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", size)))


class OneShotSum:
    """Sum over the GPUs of one host in one launch: each has written its part where all can read it, and adds them up.

    Through torch's symmetric memory, without NVLink multicast; for one token NCCL is bound by its latency. The
    memory is set up here, so that the sum can be captured in a CUDA graph. fp32, since torch has it for no fp16.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory.
    """

    def __init__(self, group: Any, elements: int, device: torch.device) -> None:
        self._buffer = symmetric_memory.empty(elements, dtype=torch.float32, device=device)
        symmetric_memory.rendezvous(self._buffer, group)
        self._group_name = group.group_name

    def part(self, *shape: int) -> torch.Tensor | None:
        """So much of the shared memory, which a sum leaves to be written again; None if it is not whole vectors of 16
        bytes or does not fit."""
        n = math.prod(shape)
        return self._buffer[:n].view(shape) if n <= self._buffer.numel() and n % 4 == 0 else None

    def holds(self, y: torch.Tensor) -> bool:
        """Whether `y` is a `part`."""
        return y.data_ptr() == self._buffer.data_ptr()

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """A new tensor."""
        total = torch.ops.symm_mem.one_shot_all_reduce(part.flatten(), "sum", self._group_name)
        return total.view_as(part)


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
