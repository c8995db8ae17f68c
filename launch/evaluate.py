"""What sparsity costs: perplexity and lm-eval tasks; dense, masked at every position, and through the decode step."""

import argparse
import itertools
import platform
import sys
from pathlib import Path

from dejavu_ds.launch.common import (
    DTYPES,
    Parser,
    add_quantize,
    forget_script_folder,
    natural,
    positive_int,
    quantize_config,
    quiet_imports,
    rank,
    run_program,
    share,
    torch_dtype,
    world_size,
)
from dejavu_ds.launch.generate import choose_predictors

EPILOG = """\
modes:
  dense    every head and neuron
  masked   every position uses its own selection; keys and values of all heads: the paper's accuracy setting
  decode   one token after the other, teacher-forced, through the step that generates: kernels, caches, missing K/V
selections, for masked and decode; all at the layers' densities in the predictor set's budget:
  predictor  what the trained predictors say
  oracle     a token's units that add most, looked up
  static     one set for all inputs: the units that add most on average on --calibration text
  random     drawn for every token afresh
Densities in the table are those realised, the mean over all layers. Those asked for are means over layers 1 and up; "-"
is the set's default, or dense.
Files for --task-file hold one JSON object a line, {"context", "continuation"} or {"query", "choices", "gold"}.
"""
COLUMNS = {
    "mode": "mode",
    "selection": "selection",
    "asked_mlp_density": "asked MLP",
    "asked_head_density": "asked head",
    "task": "task",
    "metric": "metric",
    "value": "value",
    "stderr": "stderr",
    "mlp_density": "MLP density",
    "head_density": "head density",
    "tokens": "tokens",
}


def build_parser() -> Parser:
    parser = Parser(prog="evaluate.py", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--model", help="folder or hub name of an OPT (default: the bundled trained 7 M model)")
    add("--predictors", help="folder or hub id of its predictors (default: those of the bundled model)")
    add(
        "--mode",
        nargs="+",
        choices=("dense", "masked", "decode"),
        default=["dense", "decode"],
        help="how the text is run, see below (default: dense decode)",
    )
    add(
        "--selection",
        nargs="+",
        choices=("predictor", "oracle", "static", "random"),
        default=["predictor"],
        help="what chooses heads and neurons, see below (default: predictor)",
    )
    add("--mlp-density", nargs="+", type=share, default=[None], help="shares of neurons kept (default: the set's)")
    add("--head-density", nargs="+", type=share, default=[None], help="shares of heads kept (default: the set's)")
    add("--lookahead", choices=("half", "full", "none"), help="refuse predictors of another lookahead")
    add("--dense", action="store_true", help="no predictors, --mode dense alone")
    add(
        "--head-criterion",
        choices=("norm", "contribution"),
        default="norm",
        help="oracle and static rank heads by (default: %(default)s)",
    )
    add("--calibration", help="text for the static selection: .jsonl or .txt")
    add("--calibration-windows", type=positive_int, default=64, help="spread over the text (default: %(default)s)")
    add("--match-realised", action="store_true", help="baselines at the densities the predictors realise on --data")
    add("--seed", type=int, default=0, help="of the random selection (default: %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: fp32 on CPU, else as stored")
    add_quantize(parser)
    what = parser.add_argument_group("what to measure, at least one")
    add = what.add_argument
    add("--data", help='text for perplexity: .jsonl with "text" fields, or .txt')
    add("--task", nargs="+", default=[], metavar="NAME", help="lm-eval tasks, whose data come from the hub")
    add("--task-file", nargs="+", default=[], type=named_file, metavar="NAME=FILE", help="tasks from .jsonl files")
    add("--context", type=positive_int, default=512, help="tokens of a window of --data (default: %(default)s)")
    add("--windows", type=positive_int, help="use only the first so many windows (default: all)")
    add("--num-fewshot", type=natural, help="examples in a task's prompt (default: the task's own, or none)")
    add("--limit", type=positive_int, help="use only the first so many items of a task (default: all)")
    add("--out", help="file for the results as JSON")
    add("--commit", help="commit that the figures belong to, for a copy without git history")
    return parser


def named_file(text: str) -> tuple[str, str]:
    """An argument's type: NAME=FILE."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, got {text!r}")
    return name, path


def main(argv: list[str] | None = None) -> None:
    """Parse, load, measure, report."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    if not (args.data or args.task or args.task_file):
        parser.error("nothing to measure: give --data, --task or --task-file")
    if args.dense:
        args.mode = ["dense"]
    if set(args.mode) != {"dense"} and "static" in args.selection and not args.calibration:
        parser.error("--selection static needs --calibration, a text on which its sets are chosen")
    if args.match_realised and not (args.data and args.selection[0] == "predictor"):
        parser.error("--match-realised needs --data, and predictor as the first --selection")
    run_program(parser, run, args)


def run(args) -> None:
    """Measure every setting, print a table, write the JSON."""
    from transformers import AutoTokenizer

    import dejavu_ds
    from dejavu_ds.bench.results import write_results
    from dejavu_ds.checkpoint import bundled_model

    if args.out:
        # Not after hours that the folder turns out to be impossible.
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    model = str(bundled_model()) if args.model is None else args.model
    tokenizer = AutoTokenizer.from_pretrained(model)
    benchmarks = load_benchmarks(args, tokenizer)
    predictors = find_predictors(args)
    engine = dejavu_ds.init_inference(
        model,
        predictors=predictors,
        sparsity=None if predictors is None else dejavu_ds.SparsityConfig(lookahead=args.lookahead),
        quantize=quantize_config(args),
        tensor_parallel={"tp_size": world_size()},
        **({} if (dtype := torch_dtype(args.dtype)) is None else {"dtype": dtype}),
    )
    static = static_scores(engine, args, tokenizer)
    # What the files hold now, not after hours.
    found = None
    if args.out and rank() == 0:
        found = conditions(engine, args, "launch/evaluate.py", predictors)
        found["quantize_predictors"] = args.quantize_predictors
    rows, realised = [], {}
    for mode, selection, sparsity in settings(args):
        matched = realised.get((mode, sparsity)) if args.match_realised else None
        select(engine, mode, selection, sparsity, static, args, matched)
        about = describe(engine, Path(model).name, mode, selection, sparsity, args)
        for benchmark in benchmarks:
            measured, by_layer = benchmark(engine, mode)
            rows += [{**about, **row} for row in measured]
            realised.setdefault((mode, sparsity), by_layer)
    if rank() == 0:
        print_table(rows)
        if args.out:
            write_results(args.out, {"conditions": found, "rows": rows})


def find_predictors(args) -> str | None:
    """The predictor set to load; None for dense, and for baselines of a model for which none is given."""
    needed = set(args.mode) != {"dense"} and "predictor" in args.selection
    if not needed and args.model is not None and args.predictors is None and not args.dense:
        return None
    single = {"mlp_density": args.mlp_density[0], "head_density": args.head_density[0]}
    return choose_predictors(argparse.Namespace(**{**vars(args), **single}))


def load_benchmarks(args, tokenizer) -> list:
    """Functions (engine, mode) -> (rows of what is measured, {unit: densities by layer}); perplexity first."""
    from dejavu_ds.text import cut_windows, read_documents, token_ids

    benchmarks = []
    if args.data:
        windows = cut_windows(token_ids(read_documents(args.data), tokenizer), args.context)[: args.windows]
        benchmarks.append(lambda engine, mode: measure_perplexity(engine, mode, windows))
    if args.task or args.task_file:
        with quiet_imports():
            local_task = import_harness().local_task
        tasks = [*args.task, *(local_task(name, path) for name, path in args.task_file)]
        benchmarks += [
            lambda engine, mode, task=task: measure_task(engine, mode, task, tokenizer, args) for task in tasks
        ]
    return benchmarks


def import_harness():
    """The module that needs the extra; ValueError without it."""
    try:
        from dejavu_ds import harness
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "lm_eval":
            raise ValueError("tasks need lm-eval: pip install -e '.[eval]'") from error
        raise
    return harness


def settings(args) -> list:
    """(mode, selection, sparsity), each once; the dense mode has neither of the latter."""
    from dejavu_ds import SparsityConfig

    densities = [SparsityConfig(mlp, heads) for mlp, heads in itertools.product(args.mlp_density, args.head_density)]
    modes = dict.fromkeys(args.mode)
    sparse = itertools.product((m for m in modes if m != "dense"), dict.fromkeys(args.selection), densities)
    return [*(("dense", None, None) for mode in modes if mode == "dense"), *sparse]


def static_scores(engine, args, tokenizer):
    """Mean scores on the calibration text; None where no static selection is asked for."""
    from dejavu_ds.baselines import mean_scores
    from dejavu_ds.text import cut_windows, read_documents, token_ids

    if set(args.mode) == {"dense"} or "static" not in args.selection:
        return None
    windows = cut_windows(token_ids(read_documents(args.calibration), tokenizer), args.context)
    # Spread, since documents of one kind often stand together.
    windows = windows[:: max(1, len(windows) // args.calibration_windows)][: args.calibration_windows]
    return mean_scores(engine, windows, args.head_criterion, progress=rank() == 0)


def select(engine, mode: str, selection: str | None, sparsity, static, args, densities) -> None:
    """Attach the selection, at given densities by layer or those of the budget; none for dense."""
    from dejavu_ds import SparsityConfig
    from dejavu_ds.baselines import use_selection

    if mode == "dense":
        engine.attach({}, SparsityConfig())
    else:
        use_selection(
            engine,
            selection,
            sparsity,
            densities=densities,
            static=static,
            criterion=args.head_criterion,
            seed=args.seed,
        )


def measure_perplexity(engine, mode: str, windows) -> tuple[list[dict], dict]:
    """The one row of a setting, and its densities by layer."""
    from dejavu_ds.evaluate import perplexity

    result = perplexity(engine, windows, mode, progress=rank() == 0)
    names = ("value", "stderr", "mlp_density", "head_density", "tokens")
    row = {"task": "perplexity", "metric": "perplexity", **{name: getattr(result, name) for name in names}}
    return [row], {"mlp": result.mlp_by_layer, "heads": result.heads_by_layer}


def measure_task(engine, mode: str, task, tokenizer, args) -> tuple[list[dict], dict]:
    """A row a metric, and the densities by layer."""
    harness = import_harness()
    lm = harness.EngineLM(engine, tokenizer, mode)
    results = harness.run_task(lm, task, args.num_fewshot, args.limit)
    mlp, heads = lm.scorer.densities_by_layer()
    shared = {"mlp_density": sum(mlp) / len(mlp), "head_density": sum(heads) / len(heads), "tokens": lm.tokens}
    return [{**vars(result), **shared} for result in results], {"mlp": mlp, "heads": heads}


def describe(engine, model: str, mode: str, selection: str | None, sparsity, args) -> dict:
    """What the rows of one setting have in common."""
    criteria = {"oracle": args.head_criterion, "static": args.head_criterion}
    lookahead = None
    if selection == "predictor":
        criteria["predictor"] = engine.predictors.metadata.get("criterion")
        lookahead = engine.predictors.lookahead
    return {
        "model": model,
        "mode": mode,
        "selection": selection,
        "criterion": criteria.get(selection),
        "lookahead": lookahead,
        "quantize": args.quantize,
        "asked_mlp_density": None if sparsity is None else sparsity.mlp_density,
        "asked_head_density": None if sparsity is None else sparsity.head_density,
    }


def print_table(rows: list[dict]) -> None:
    """The rows, for reading."""
    from rich.console import Console
    from rich.table import Table

    def cell(value) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    table = Table(*COLUMNS.values())
    for row in rows:
        table.add_row(*(cell(row[column]) for column in COLUMNS))
    # A pipe has no width of its own, and rich's default for it cuts the columns short.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def conditions(engine, args, program: str, predictors: str | None) -> dict:
    """What the figures are measured under, the texts' and the predictors' checksums and the commit among it."""
    import torch

    from dejavu_ds import storage
    from dejavu_ds.bench import results

    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else platform.machine()
    general = results.conditions(results.command_line(program, args.argv), args.commit)
    weights = None if predictors is None else storage.locate(predictors) / storage.WEIGHTS_FILE
    files = {"data": args.data, "calibration": args.calibration, "predictors": weights}
    files |= {f"task {name}": path for name, path in args.task_file}
    return {
        "device": device,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "tp": world_size(),
        "context": args.context,
        "data": Path(args.data).name if args.data else None,
        "calibration": Path(args.calibration).name if args.calibration else None,
        # A name alone does not say which text it was, or which predictors.
        "sha256": {name: storage.sha256_of(path) for name, path in files.items() if path},
        "densities": "as the predictors realise" if args.match_realised else "as the budget says",
        "num_fewshot": args.num_fewshot,
        "limit": args.limit,
        "seed": args.seed,
        **{key: general[key] for key in ("versions", "command", "commit")},
    }


if __name__ == "__main__":
    forget_script_folder()
    main()
