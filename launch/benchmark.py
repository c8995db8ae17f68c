"""Measure a decode step, its kernels, batches and tensor parallelism against Hugging Face and DeepSpeed."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

from dejavu_ds.launch.common import (
    DTYPES,
    QUANTIZE,
    Parser,
    add_quantize,
    exit_with_error,
    forget_script_folder,
    natural,
    positive_int,
    quantize_config,
    rank,
    run_program,
    share,
    shared_by_rank_0,
    torch_dtype,
    world_size,
)

EPILOG = """\
benchmarks:
  kernels  the operations of one layer against torch's dense ones; --shape opt-175b/4 is a rank's share
  decode   one step of one sequence, by context
  batch    one step of several sequences, by batch size; each keeps an independent set, the batch their union
  tp       decode split over several GPUs: tp --num-gpus N, or deepspeed --num_gpus N launch/benchmark.py tp
  tune     search the projections' block sizes and keep the fastest in kernels/tuned.json
  plot     draw a results file of decode, batch or tp, wherever that was made

systems:
  hf-eager           Hugging Face's model as it is
  hf-compiled        with its static cache, the step compiled by torch
  deepspeed          deepspeed.init_inference of it, by AutoTP
  deepspeed-kernels  the same with replace_with_kernel_inject=True
  dense              this project's engine without predictors
  sparse             with predictors: random ones (--rank) whose thresholds give just the density asked for, or
                     --predictors of a --model

A system that fails is a row that says so. docs/benchmark.md explains the rows and how they are measured.
"""
BENCHMARKS = ("kernels", "decode", "batch", "tp", "tune", "plot")
SYSTEMS = ("hf-eager", "hf-compiled", "deepspeed", "dense", "sparse", "deepspeed-kernels")
OURS = ("dense", "sparse")
KERNEL_SHAPES = ("opt-1.3b", "opt-6.7b", "opt-30b", "opt-66b", "opt-66b/4", "opt-175b/4", "opt-175b/8")
_WARMUP = 10


def open_share(text: str) -> float:
    """An argument's type: a number between 0 and 1, without both."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def build_parser() -> Parser:
    parser = Parser(prog="benchmark.py", description=__doc__, epilog=EPILOG)
    subparsers = parser.add_subparsers(dest="benchmark", required=True, metavar="|".join(BENCHMARKS))
    for name in BENCHMARKS:
        sub = subparsers.add_parser(name, prog=f"benchmark.py {name}", description=__doc__, epilog=EPILOG)
        if name == "plot":
            sub.add_argument("results", metavar="FILE.json", help="what --out has written")
            sub.add_argument("--plot", metavar="FILE.png", required=True, help="as of the other benchmarks")
            continue
        add_sizes(sub, name)
        if name not in ("kernels", "tune"):
            add_systems(sub, name)
        if name == "tune":
            add_tuning(sub)
        else:
            add_measuring(sub, name)
    return parser


def add_sizes(sub: Parser, name: str) -> None:
    """Which model, in which setting."""
    add = sub.add_argument
    if name in ("kernels", "tune"):
        add("--shape", nargs="+", default=list(KERNEL_SHAPES), metavar="SHAPE[/TP]", help="default: %(default)s")
    else:
        which = sub.add_mutually_exclusive_group(required=True)
        which.add_argument("--shape", help="sizes with random weights: opt-30b, a folder with config.json, or numbers")
        which.add_argument("--model", help="folder or hub name of an OPT")
    add("--contexts", nargs="+", type=positive_int, default=[256], help="tokens attended to (default: %(default)s)")
    batches = [1, 2, 4, 8, 16] if name == "batch" else [1]
    add("--batch-sizes", nargs="+", type=positive_int, default=batches, help="default: %(default)s")
    mlp, heads = (0.05, 1.0) if name == "batch" else (0.15, 0.5)
    add("--mlp-density", type=share, default=mlp, help="neurons that a sequence keeps (default: %(default)s)")
    add("--head-density", type=share, default=heads, help="heads that a sequence keeps (default: %(default)s)")
    add("--dtype", choices=tuple(DTYPES), help="default: fp16 on a GPU, fp32 on a CPU")
    if name == "kernels":
        add("--quantize", choices=QUANTIZE, help="the MLP over 4-bit weights as well, ours and bitsandbytes'")


def add_systems(sub: Parser, name: str) -> None:
    """What is compared."""
    add = sub.add_argument
    systems = ["deepspeed", "dense", "sparse"] if name == "tp" else list(SYSTEMS)
    add("--systems", nargs="+", choices=SYSTEMS, default=systems, help="default: %(default)s")
    add_quantize(sub)
    add("--also-unpacked", action="store_true", help="with --quantize, all systems over 16-bit weights before")
    add("--predictors", help="folder or hub id of the model's predictors (default: random ones)")
    add("--rank", type=positive_int, help="of random predictors (default: 6 %% of the parameters, 256 at most)")
    add(
        "--active-share",
        type=open_share,
        default=0.5,
        help="random weights: neurons that a token activates; fc2 skips the others (default: %(default)s)",
    )
    if name == "tp":
        add("--num-gpus", type=positive_int, help="start so many processes by DeepSpeed's launcher (default: one)")


def add_tuning(sub: Parser) -> None:
    """What is searched and where the result goes."""
    from dejavu_ds.kernels.configs import KERNELS, TUNED_FILE

    add = sub.add_argument
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="default: %(default)s")
    add("--workers", type=positive_int, default=os.cpu_count(), help="processes that compile (default: %(default)s)")
    add("--steps", type=positive_int, default=30, help="timed replays of a candidate (default: %(default)s)")
    add("--out", metavar="FILE.json", default=str(TUNED_FILE), help="default: %(default)s")
    add("--all", metavar="FILE.json", help="write the times of all candidates as well")


def add_measuring(sub: Parser, name: str) -> None:
    """How it is measured and where it goes."""
    add = sub.add_argument
    add("--steps", type=positive_int, help="timed steps or replays (default: 50 on a GPU, 8 on a CPU)")
    if name != "kernels":
        add("--generate-tokens", type=natural, help="timed end to end, 0: none (default: 64 on a GPU, 9 on a CPU)")
        add("--plot", metavar="FILE.png", help="latency by prompt length, or by batch size")
    add("--out", metavar="FILE.json", help="write conditions and rows")
    add("--commit", help="commit that the figures belong to, for a copy without git history")


def main(argv: list[str] | None = None) -> None:
    """Parse, check, measure, report."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    for name in ("out", "plot", "all"):
        file = getattr(args, name, None)
        if file and not Path(file).absolute().parent.is_dir():
            parser.error(f"--{name} {file}: there is no folder {Path(file).absolute().parent}")
    if args.benchmark == "tp":
        start_ranks(parser, args)
    elif world_size() > 1:
        parser.error(f"{args.benchmark} runs in one process; under the launcher use tp")
    programs = {"kernels": run_kernels, "tune": run_tune, "plot": run_plot}
    run_program(parser, programs.get(args.benchmark, run_decode), args)


def start_ranks(parser: Parser, args) -> None:
    """Run again under DeepSpeed's launcher if several processes are asked for and none was started."""
    wanted = args.num_gpus or world_size()
    if "WORLD_SIZE" in os.environ:
        if wanted != world_size():
            parser.error(f"--num-gpus {wanted} under a launcher of {world_size()} process(es); drop it")
        return
    if wanted > 1:
        # A port of its own, so that two runs on a host do not meet.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(wanted)]
        launcher += ["--master_port", str(port)]
        sys.exit(subprocess.run([*launcher, str(Path(__file__).resolve()), *args.argv]).returncode)


def run_decode(args) -> None:
    """decode, batch and tp."""
    from dejavu_ds.bench.decode import run_plan
    from dejavu_ds.bench.plot import check_matplotlib

    if args.plot:
        check_matplotlib()
    rows = []
    for plan in make_plans(args):
        for more in run_plan(plan):
            rows += more
            save(args, rows)
    if rank() == 0:
        report(args, rows)
    fail_if_ours_failed(rows)


def make_plans(args) -> list:
    """One plan, or with --also-unpacked two; everything checked that can be before a weight is made."""
    from dataclasses import replace

    packed = quantize_config(args)
    if not args.also_unpacked:
        return [make_plan(args, packed)]
    if packed is None:
        raise ValueError("--also-unpacked goes with --quantize nf4 or fp4: give both, or neither")
    ours = tuple(name for name in args.systems if name in OURS)
    if not ours:
        raise ValueError(f"--quantize packs {' and '.join(OURS)}: name one of them among the --systems")
    plan = make_plan(args, None)
    return [plan, replace(plan, systems=ours, source=replace(plan.source, quantize=packed))]


def make_plan(args, packed):
    """What the arguments ask for, our engine's weights `packed` or not."""
    from dejavu_ds import PredictorSet
    from dejavu_ds.bench.decode import IN_ONE_PROCESS, Load, Plan
    from dejavu_ds.bench.random_predictors import default_ranks
    from dejavu_ds.bench.source import Source
    from dejavu_ds.bench.traffic import Limit

    device = choose_device(args)
    defaults = (50, 64) if device.type == "cuda" else (8, 9)
    args.steps = args.steps or defaults[0]
    generated = defaults[1] if args.generate_tokens is None else args.generate_tokens
    if args.predictors and args.model is None:
        raise ValueError("--predictors belong to a --model; a --shape has random ones")
    if world_size() > 1 and (alone := [name for name in args.systems if name in IN_ONE_PROCESS]):
        raise ValueError(f"{', '.join(alone)} runs in one process, not in {world_size()}: leave it out of --systems")
    shape = find_shape(args)
    if shape.heads % world_size():
        raise ValueError(f"{shape.heads} heads of {shape.name} do not divide by {world_size()} processes")
    ranks = dict.fromkeys(("mlp", "heads"), args.rank) if args.rank else default_ranks(shape)
    loads = [
        Load.make(shape, batch, context, args.steps, min(_WARMUP, args.steps), device)
        for batch in args.batch_sizes
        for context in args.contexts
    ]
    predictors = PredictorSet.from_pretrained(args.predictors) if args.predictors else None
    dtype = torch_dtype(args.dtype)
    source = Source(shape, dtype, device, world_size(), args.model, predictors, args.active_share, packed)
    source.check_memory(ours_only=set(OURS) >= set(args.systems))
    limit = shared_by_rank_0(lambda: Limit.measure(device).gb_per_s)
    return Plan(
        args.benchmark,
        source,
        tuple(args.systems),
        loads,
        args.mlp_density,
        args.head_density,
        ranks,
        limit,
        generated,
        say,
    )


def choose_device(args):
    """This rank's device; fills in the default dtype."""
    import torch

    if not torch.cuda.is_available():
        args.dtype = args.dtype or "fp32"
        return torch.device("cpu")
    args.dtype = args.dtype or "fp16"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def find_shape(args):
    """The sizes asked for; of a model those of its configuration."""
    from transformers import AutoConfig

    from dejavu_ds.bench.shapes import parse_shape, shape_of
    from dejavu_ds.injection_policies import policy_for

    if args.model is None:
        return parse_shape(args.shape)
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"no model at {args.model!r}: give a folder or a hub name ({error})") from error
    policy_for(config)
    return shape_of(config, Path(args.model).name)


def run_kernels(args) -> None:
    """The operations alone."""
    from dejavu_ds.bench.kernels import kernel_rows
    from dejavu_ds.bench.traffic import Limit

    device = choose_device(args)
    args.steps = args.steps or (50 if device.type == "cuda" else 3)
    layers = make_layers(args, device)
    limit = Limit.measure(device).gb_per_s
    rows = []
    for layer in layers:
        rows += kernel_rows(layer, args.steps, limit, say, args.quantize)
        save(args, rows)
    report(args, rows)


def make_layers(args, device) -> list:
    """A rank's share of a layer in every setting asked for."""
    from dejavu_ds.bench.layer import Layer
    from dejavu_ds.bench.shapes import parse_local_shape

    shapes = [parse_local_shape(text) for text in args.shape]
    for shape, _ in shapes:
        if max(args.contexts) > shape.positions:
            raise ValueError(f"context {max(args.contexts)} is beyond the {shape.positions} positions of {shape.name}")
    settings = (args.mlp_density, args.head_density, torch_dtype(args.dtype), device)
    return [
        Layer(shape, tp, batch, context, *settings)
        for shape, tp in shapes
        for batch in args.batch_sizes
        for context in args.contexts
    ]


def run_tune(args) -> None:
    """The fastest block sizes, added to those of other shapes."""
    import json

    import torch

    from dejavu_ds.bench.tune import tune, write_tuned
    from dejavu_ds.resume import replace_file

    device = choose_device(args)
    if device.type != "cuda" or args.dtype == "fp32":
        raise ValueError(
            f"tune needs a GPU and --dtype fp16 or bf16; this is {args.dtype} on a "
            f"{'GPU' if device.type == 'cuda' else 'CPU'}"
        )
    entries = []
    for entry in tune(make_layers(args, device), args.kernels, args.steps, args.workers, say):
        entries.append(entry)
        # After every one: a search that is cut short leaves what it has.
        write_tuned([entry], torch.cuda.get_device_name(device), Path(args.out))
        if args.all:
            replace_file(Path(args.all), (json.dumps(entries) + "\n").encode())


def run_plot(args) -> None:
    """The plot of a run on another machine, or of one that was cut short."""
    from dejavu_ds.bench.plot import check_matplotlib
    from dejavu_ds.bench.results import read_results

    check_matplotlib()
    results = read_results(args.results)
    draw_steps(results["rows"], args.plot, results["conditions"]["gpu"])


def save(args, rows: list[dict]) -> None:
    """The file, after every system: a run that is cut short leaves what it has."""
    from dejavu_ds.bench.results import command_line, conditions, write_results

    if args.out and rank() == 0:
        found = conditions(command_line("launch/benchmark.py", args.argv), args.commit)
        write_results(args.out, {"conditions": found, "rows": rows})


def report(args, rows: list[dict]) -> None:
    """Table and plot."""
    from dejavu_ds.bench.results import device_name, print_table

    print_table(rows)
    if getattr(args, "plot", None):
        draw_steps(rows, args.plot, device_name())


def draw_steps(rows: list[dict], path: str, device: str) -> None:
    """The rows of steps as bars, in `path`; `device` as in the conditions."""
    from dejavu_ds.bench.plot import draw

    steps = [row for row in rows if "kernel" not in row]
    if not steps:
        raise ValueError("nothing to plot: the results have no rows of steps, as decode, batch and tp give them")
    first = steps[0]
    draw(steps, path, f"{first['shape']}, {first['dtype']}, {first['tp']} x {device.removeprefix('none; ')}")


def fail_if_ours_failed(rows: list[dict]) -> None:
    """Peers may fail; that our own engine does is an error, once everything is reported."""
    for row in rows:
        if row["system"] in OURS and row.get("error"):
            exit_with_error("benchmark.py", f"{row['system']} failed: {row['error']}")


def say(text: str) -> None:
    """Progress, on standard error of rank 0."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    forget_script_folder()
    main()
