"""Run under the launcher by test_launch.py: two ranks in a collective after another, until one fails as told.

deepspeed --num_gpus 2 tests/run_failing.py raise | kill | memory | leave | wait
"""

import os
import signal
import sys
import time
import types

import torch

from dejavu_ds.launch.common import Parser, rank, run_program


def run(args) -> None:
    """Endless on rank 0; rank 1 fails after a few rounds, or says that it runs."""
    from deepspeed import comm

    from dejavu_ds.collectives import init_distributed

    init_distributed()
    total = torch.ones(1)
    for i in range(10**9):
        comm.all_reduce(total.fill_(1))
        if rank() == 1 and i == 3:
            fail(args.how)
        time.sleep(0.02)


def fail(how: str) -> None:
    print("failing at", time.time(), flush=True)
    if how == "raise":
        raise KeyError("rank 1 lost its key")
    if how == "memory":
        torch.empty(2**50)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        os._exit(0)


def main() -> None:
    # Slow to import, and there is no engine here.
    sys.modules["dejavu_ds.engine"] = types.ModuleType("dejavu_ds.engine")
    parser = Parser(prog="failing.py")
    parser.add_argument("how")
    run_program(parser, run, parser.parse_args())


if __name__ == "__main__":
    main()
