"""What the command-line programs share: quiet ranks, errors that end every rank, model and dtype arguments."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def rank() -> int:
    """This process's rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes of the job as the launcher set it; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Parser(argparse.ArgumentParser):
    """An argument parser that speaks on rank 0 alone and takes the launcher's --local_rank."""

    def __init__(self, **kwargs) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        self.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)

    def print_help(self, file=None) -> None:
        if rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if rank() == 0:
            super().error(message)
        sys.exit(2)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import DeepSpeed and transformers with their logs on standard error, so that standard output is ours."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


def set_cpu_threads() -> None:
    """Share the cores among the ranks of this host; ranks that each start a thread a core mostly wait for another."""
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))


@contextlib.contextmanager
def reported_errors(program: str) -> Iterator[None]:
    """Turn bad input into one line on rank 0 and exit status 2 on every rank; other errors keep their traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if rank() == 0:
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def torch_dtype(name: str):
    """--dtype to a torch dtype; "auto" is fp32 on a CPU and the checkpoint's own (None) on a GPU."""
    import torch

    if name == "auto":
        return None if torch.cuda.is_available() else torch.float32
    return getattr(torch, DTYPES[name])


def shared_by_rank_0(produce):
    """`produce()` on rank 0, its result on every rank; an error there is raised on every rank alike.

    For what only one process can read, such as standard input.
    """
    if world_size() == 1:
        return produce()
    from deepspeed import comm as dist

    from dejavu_ds.collectives import init_distributed

    init_distributed()
    box: list = [None]
    if rank() == 0:
        try:
            box[0] = produce()
        except (ValueError, OSError) as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]
