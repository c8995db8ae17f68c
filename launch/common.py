"""What the command-line programs share: quiet ranks, errors that end every rank, model and dtype arguments."""

import argparse
import contextlib
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
QUANTIZE = ("nf4", "fp4")
_PATIENCE_S = 10
# Arguments: a process to wait for, a minute at most, and the line to say then.
_REPEAT = """
n=0
while kill -0 "$1" && [ $n -lt 1200 ]; do sleep 0.05; n=$((n + 1)); done 2>/dev/null
printf '%s\\n' "$2" >&2
"""


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """How our engine's weights are packed."""
    add = parser.add_argument
    add("--quantize", choices=QUANTIZE, help="pack the blocks' weights in 4 bits (default: not packed)")
    add("--quantize-predictors", action="store_true", help="with --quantize, the predictors too: in 4 and 8 bits")


def quantize_config(args):
    """What `init_inference` takes, of the arguments of `add_quantize`. Raises ValueError where they do not fit."""
    if not args.quantize:
        if args.quantize_predictors:
            raise ValueError("--quantize-predictors goes with --quantize nf4 or fp4: give both, or neither")
        return None
    from dejavu_ds.quantize import QuantizeConfig

    return QuantizeConfig(args.quantize, predictors=args.quantize_predictors)


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
        exit_with_error(self.prog, f"{message} (--help lists the options)")


def forget_script_folder() -> None:
    """Take the running script's folder off the module path, where Python puts it.

    In there our evaluate.py would pass for the package of that name, which lm-eval imports, and our generate.py for
    anybody's.
    """
    folder = Path(sys.modules["__main__"].__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != folder]


def positive_int(text: str) -> int:
    """An argument's type: a whole number from 1 on."""
    return _number(text, int, lambda value: value >= 1, "a whole number from 1 on")


def natural(text: str) -> int:
    """An argument's type: a whole number from 0 on."""
    return _number(text, int, lambda value: value >= 0, "a whole number from 0 on")


def positive_float(text: str) -> float:
    """An argument's type: a finite number above 0."""
    return _number(text, float, lambda value: 0 < value < math.inf, "a finite number above 0")


def share(text: str) -> float:
    """An argument's type: a number in (0, 1]."""
    return _number(text, float, lambda value: 0 < value <= 1, "in (0, 1]")


def _number(text: str, kind: type, allowed: Callable[[float], bool], range_: str):
    # argparse would name this function in its complaint about a ValueError.
    with contextlib.suppress(ValueError):
        if allowed(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"must be {range_}, got {text}")


def exit_with_error(program: str, message: str) -> NoReturn:
    """One line on standard error, whatever a library wrote, and exit status 2; of several ranks one speaks.

    The launcher ends all ranks as soon as one has failed. So the others give rank 0 time to meet the same error and
    report it; one that is still alive after that has an error of its own.
    """
    if rank():
        time.sleep(_PATIENCE_S)
    line = f"{program}: error: {' '.join(message.split())}"
    print(line, file=sys.stderr, flush=True)
    if world_size() > 1:
        repeat_at_the_end(line)
        # Gloo's threads, torn down with the interpreter, now and then abort the process: a second complaint and another
        # exit status. Closing the group, as `leave_job` does, would wait for ranks that are elsewhere.
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)


def exit_as_rank(program: str, error: Exception) -> NoReturn:
    """End one of several ranks on an error that is no bad input: what it was is said last, with exit status 1.

    When a rank is gone, the others find their connections cut and fail too. So those wait for the launcher to end them,
    and speak only if nobody does, as on another host: the error that began it stays the last one to be seen.
    """
    message = str(error).strip() or type(error).__name__
    if _is_lost_connection(error):
        time.sleep(_PATIENCE_S)
        message = f"another rank is gone, its own output says why ({message.splitlines()[0]})"
    elif _is_out_of_memory(error):
        message = (
            f"out of memory: {message.splitlines()[0]} More processes split the model further, --quantize nf4 makes it "
            "smaller, shorter prompts and fewer at a time need less beside it"
        )
    else:
        message = f"{''.join(traceback.format_exception(error))}{program}: error: {type(error).__name__}: {message}"
    text = message if message.startswith("Traceback") else f"{program}: error: {message}"
    text = f"{text} [rank {rank()}]"
    print(text, file=sys.stderr, flush=True)
    repeat_at_the_end(text.splitlines()[-1])
    # Not by the interpreter's own end, which waits for communication with ranks that are elsewhere.
    sys.stdout.flush()
    os._exit(1)


def repeat_at_the_end(line: str) -> None:
    """Have a line said once more when the launcher has ended, which says some of its own after it.

    By a shell that is none of this process's children by then, for the launcher ends those.
    """
    arguments = ["sh", "-c", _REPEAT, "sh", str(os.getppid()), line]
    with contextlib.suppress(OSError):
        subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True
        )


def _is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed, as it does when another rank has ended."""
    import torch.distributed as dist

    # Gloo's errors have no type of their own.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    # Nor has that of torch's allocator on a CPU.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import DeepSpeed and transformers with their logs on standard error, so that standard output is ours."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


def quiet_other_ranks() -> None:
    """Leave transformers' progress bars to rank 0."""
    if rank():
        from transformers.utils import logging

        logging.disable_progress_bar()


def set_cpu_threads() -> None:
    """Share the cores among the ranks of this host; ranks that each start a thread a core mostly wait for another."""
    import torch

    # DeepSpeed's launcher and torch's have names of their own for it.
    local = int(next(filter(None, map(os.environ.get, ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))), "1"))
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))


@contextlib.contextmanager
def reported_errors(program: str) -> Iterator[None]:
    """Turn bad input into `exit_with_error`; errors of other kinds keep their traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        exit_with_error(program, str(error))


def leave_job() -> None:
    """Close the connections to the other ranks, at the end of a run that went well.

    Without it gloo's threads are torn down with the interpreter, which now and then aborts a process that had finished.
    Not for the way out of an error: the other ranks may be waiting elsewhere, and closing would wait for them.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        from dejavu_ds.runner import release_graphs

        dist.barrier()
        release_graphs()
        dist.destroy_process_group()


@contextlib.contextmanager
def job(program: str) -> Iterator[None]:
    """What runs inside ends a job of one or several processes in order, as docs/launching.md has it; also in programs
    of your own: `with job("mine.py"): main()`."""
    try:
        with reported_errors(program):
            yield
        leave_job()
    except KeyboardInterrupt as error:
        # One that a program raises itself says how to go on.
        print(f"{program}: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
        # As `exit_with_error` does, and as a shell reports a signal.
        (os._exit if world_size() > 1 else sys.exit)(130)
    except Exception as error:
        if world_size() == 1:
            raise
        exit_as_rank(program, error)


def run_program(parser: Parser, run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """What every program does once its arguments are checked: quiet set-up, `run(args)`, a clean end."""
    with job(parser.prog):
        with quiet_imports():
            import dejavu_ds.engine  # noqa: F401  (slow to import: after the arguments have been checked)
        quiet_other_ranks()
        set_cpu_threads()
        run(args)


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
