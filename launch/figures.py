"""Draw what contextual sparsity rests on, for any supported model: PNG and JSON, one pair a figure."""

import io
import json
import sys
from pathlib import Path

from dejavu_ds.launch.common import (
    DTYPES,
    Parser,
    forget_script_folder,
    positive_int,
    rank,
    run_program,
    share,
    torch_dtype,
    world_size,
)
from dejavu_ds.launch.evaluate import conditions, find_predictors, load_benchmarks, named_file, select, static_scores
from dejavu_ds.resume import replace_file

EPILOG = """\
figures:
  idle     share of heads and neurons that idle, layer by layer (figure 3 of the Deja Vu paper)
  density  perplexity, and with --task-file accuracy, against the density realised, by selection (figures 1b and 6)
  stream   cosine of the stream before and after a block; norms of the stream and of what a unit adds (figure 5)
  union    share of neurons that a batch needs together, against its size (figure 8)
  recall   share of the active neurons and of the most important heads that the predictors keep, layer by layer
Without predictors (--model alone) there are no predictor's curves and no recall.
"""
FIGURES = ("idle", "density", "stream", "union", "recall")
COLORS = {"predictor": "C0", "oracle": "C2", "static": "C1", "random": "C3"}


def build_parser() -> Parser:
    parser = Parser(prog="figures.py", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--model", help="folder or hub name of an OPT (default: the bundled trained 7 M model)")
    add("--predictors", help="folder or hub id of its predictors (default: those of the bundled model)")
    add("--data", required=True, help='text to measure on: .jsonl with "text" fields, or .txt')
    add("--calibration", help="text for the static selection, which is left out without it")
    add("--out", required=True, help="folder for the figures")
    add("--only", nargs="+", choices=FIGURES, default=list(FIGURES), help="default: all")
    add("--mode", choices=("masked", "decode"), default="masked", help="of the density figure (default: %(default)s)")
    add_densities(parser)
    add(
        "--head-criterion",
        choices=("norm", "contribution"),
        default="norm",
        help="oracle and static rank heads by (default: %(default)s)",
    )
    add("--task-file", nargs=1, default=[], type=named_file, metavar="NAME=FILE", help="task with an accuracy")
    add("--limit", type=positive_int, help="use only the first so many items of the task (default: all)")
    add("--context", type=positive_int, default=512, help="tokens of a window (default: %(default)s)")
    add("--windows", type=positive_int, default=20, help="use so many windows (default: %(default)s)")
    add("--calibration-windows", type=positive_int, default=64, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the random selection and the batches (default: %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: fp32 on CPU, else as stored")
    add("--commit", help="commit that the figures belong to, for a copy without git history")
    return parser


def add_densities(parser: Parser) -> None:
    """What is kept where."""

    def add(option: str, default: list[float], text: str, nargs: int | str = "+", **more) -> None:
        shown = " ".join(map(str, default))
        parser.add_argument(option, nargs=nargs, type=share, default=default, help=f"{text} (default: {shown})", **more)

    add("--mlp-density", [0.05, 0.1, 0.2, 0.4, 0.7], "shares of neurons in the density figure")
    add("--head-density", [0.25, 0.5, 0.75, 0.9], "shares of heads in the density figure")
    text = "shares that predictors keep in the recall figure"
    add("--recall-density", [0.2, 0.75], text, nargs=2, metavar=("MLP", "HEADS"))


def main(argv: list[str] | None = None) -> None:
    """Parse, load, measure, draw."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    run_program(parser, run, args)


def run(args) -> None:
    """All figures asked for."""
    from transformers import AutoTokenizer

    import dejavu_ds
    from dejavu_ds.checkpoint import bundled_model

    check_matplotlib()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    model = str(bundled_model()) if args.model is None else args.model
    tokenizer = AutoTokenizer.from_pretrained(model)
    # What the evaluation program's functions ask for besides.
    args.lookahead, args.dense, args.task, args.num_fewshot, args.match_realised = None, False, [], None, False
    benchmarks = load_benchmarks(args, tokenizer)
    with_predictors = args.model is None or args.predictors is not None
    args.selection = ["predictor"] * with_predictors + ["oracle"] + ["static"] * bool(args.calibration) + ["random"]
    predictors = find_predictors(args)
    engine = dejavu_ds.init_inference(
        model,
        predictors=predictors,
        tensor_parallel={"tp_size": world_size()},
        **({} if (dtype := torch_dtype(args.dtype)) is None else {"dtype": dtype}),
    )
    # What the files hold now, not after hours.
    found = conditions(engine, args, "launch/figures.py", predictors) if rank() == 0 else None
    figures = {}
    if set(args.only) - {"density"}:
        figures.update(observe_figures(engine, args, tokenizer))
    if "density" in args.only:
        figures["density"] = density_figure(engine, args, tokenizer, benchmarks)
    if rank() == 0:
        for name, (figure, data) in figures.items():
            figure.savefig(image := io.BytesIO(), format="png", dpi=150)
            replace_file(Path(args.out) / f"{name}.png", image.getvalue())
            data = {"model": Path(model).name, "text": Path(args.data).name, "conditions": found, **data}
            replace_file(Path(args.out) / f"{name}.json", (json.dumps(data, indent=1) + "\n").encode())
            print(f"{Path(args.out) / name}.png and .json")


def check_matplotlib() -> None:
    """ValueError without the extra."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("figures need matplotlib: pip install -e '.[figures]'") from error


def observe_figures(engine, args, tokenizer) -> dict:
    """{name: (figure, data)} of those that one dense pass gives."""
    from dejavu_ds import SparsityConfig
    from dejavu_ds.baselines import layer_densities, use_selection
    from dejavu_ds.observe import observe
    from dejavu_ds.text import cut_windows, read_documents, token_ids

    windows = cut_windows(token_ids(read_documents(args.data), tokenizer), args.context)[: args.windows]
    sparsity = SparsityConfig(*args.recall_density)
    if engine.predictors is not None:
        use_selection(engine, "predictor", sparsity)
    densities = layer_densities(engine, sparsity)
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= args.context]
    seen = observe(engine, windows, densities["heads"], sizes, args.seed, progress=rank() == 0)
    drawn = {"idle": idle_figure, "stream": stream_figure, "union": union_figure}
    figures = {name: draw(seen) for name, draw in drawn.items() if name in args.only}
    if "recall" in args.only and engine.predictors is not None:
        figures["recall"] = recall_figure(seen, densities)
    return figures


def new_figure(panels: int):
    """An empty figure with its axes, without a window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    return figure, axes


def log_axis(ax) -> None:
    """Logarithmic values at 1, 2 and 5, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def legend_below(ax) -> None:
    """Where it covers no data."""
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3)


def layer_axis(ax, layers: int) -> None:
    """Whole numbers for layers, not too many of them."""
    ax.set_xlabel("layer")
    ax.set_xticks(range(0, layers, max(1, layers // 12)))


def idle_figure(seen):
    """Idle heads and neurons by layer."""
    figure, (heads, neurons) = new_figure(2)
    for ax, values, name in ((heads, seen.idle_heads, "heads"), (neurons, seen.idle_neurons, "neurons")):
        ax.bar(range(len(values)), values, color="C0" if name == "heads" else "C1")
        ax.set(title=f"idle {name}, a token", ylabel="share", ylim=(0, 1))
        layer_axis(ax, len(values))
    return figure, {"tokens": seen.tokens, "idle_heads": seen.idle_heads, "idle_neurons": seen.idle_neurons}


def stream_figure(seen):
    """How slowly the residual stream changes."""
    figure, (cosine, attention, mlp) = new_figure(3)
    layers = range(len(seen.cosine))
    cosine.plot(layers, seen.cosine, "o-")
    cosine.set(title="stream before and after a block", ylabel="cosine similarity", ylim=(min(0, *seen.cosine), 1.02))
    for ax, unit in ((attention, "attention"), (mlp, "mlp")):
        ax.plot(layers, seen.norms[unit]["x"], "o-", label="x, the stream before it")
        ax.plot(layers, seen.norms[unit]["f"], "s-", label="F(x), what it adds")
        ax.set(title="MLP" if unit == "mlp" else unit, ylabel="norm, mean over tokens")
        log_axis(ax)
        legend_below(ax)
    for ax in (cosine, attention, mlp):
        layer_axis(ax, len(layers))
    return figure, {"tokens": seen.tokens, "cosine": seen.cosine, "norms": seen.norms}


def union_figure(seen):
    """Neurons needed by a batch together."""
    both = {"active": seen.active_union}
    if any(value is not None for value in seen.neuron_recall):
        both["kept by predictors"] = seen.kept_union
    figure, axes = new_figure(len(both))
    for ax, (name, union) in zip(axes, both.items(), strict=True):
        layers = len(next(iter(union.values())))
        for layer in range(layers):
            label = f"one layer each, {layers} in all" if layer == 0 else None
            ax.plot(list(union), [union[n][layer] for n in union], color="C0", alpha=0.25, label=label)
        ax.plot(list(union), [sum(union[n]) / layers for n in union], "o-", color="C0", label="mean over layers")
        ax.set(title=f"neurons {name}, union of a batch", xlabel="batch size", ylabel="share", ylim=(0, 1.02))
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(union), [str(n) for n in union])
        legend_below(ax)
    return figure, {"tokens": seen.tokens, "active_union": seen.active_union, "kept_union": seen.kept_union}


def recall_figure(seen, densities: dict):
    """What the predictors find; a layer that keeps everything has no bar."""
    figure, axes = new_figure(2)
    panels = (("mlp", seen.neuron_recall, "active neurons"), ("heads", seen.head_recall, "most important heads"))
    for ax, (unit, recall, title) in zip(axes, panels, strict=True):
        layers = range(len(recall))
        ax.bar(layers, [value or 0 for value in recall], color="C0", alpha=0.6, label="recall")
        ax.plot(layers, densities[unit], "k_", markersize=14, label="density asked for, the recall of chance")
        ax.set(title=title, ylabel="share", ylim=(0, 1.02))
        legend_below(ax)
        layer_axis(ax, len(recall))
    data = {"neuron_recall": seen.neuron_recall, "head_recall": seen.head_recall}
    return figure, {"tokens": seen.tokens, "asked": densities, **data}


def density_figure(engine, args, tokenizer, benchmarks):
    """Perplexity, and accuracy, with standard errors against the density of either unit; the other one is dense."""
    rows = density_rows(engine, args, tokenizer, benchmarks)
    keys = list(dict.fromkeys((row["unit"], row["task"]) for row in rows if row["unit"]))
    figure, axes = new_figure(len(keys))
    for ax, (unit, task) in zip(axes, keys, strict=True):
        (dense,) = (row for row in rows if row["unit"] is None and row["task"] == task)
        ax.axhline(dense["value"], color="gray", linestyle=":", label="dense")
        for selection in args.selection:
            picked = [r for r in rows if (r["unit"], r["task"], r["selection"]) == (unit, task, selection)]
            picked.sort(key=lambda row: row["density"])
            x, y, error = ([row[key] for row in picked] for key in ("density", "value", "stderr"))
            ax.errorbar(x, y, error, fmt="o-", capsize=2, color=COLORS[selection], label=selection)
        name = "neurons" if unit == "mlp" else "heads"
        ax.set(title=f"{task}, {args.mode}", xlabel=f"{name} kept, mean over layers", ylabel=dense["metric"])
        if dense["metric"] == "perplexity":
            log_axis(ax)
        legend_below(ax)
    return figure, {"mode": args.mode, "rows": rows}


def density_rows(engine, args, tokenizer, benchmarks) -> list[dict]:
    """One row a selection, density and benchmark; of a task's metrics the first accuracy."""
    from dejavu_ds import SparsityConfig

    static = static_scores(engine, args, tokenizer)
    rows = []

    def measure(mode: str, selection: str | None, unit: str | None, sparsity) -> None:
        select(engine, mode, selection, sparsity, static, args, None)
        for benchmark in benchmarks:
            measured, _ = benchmark(engine, mode)
            for row in [row for row in measured if row["task"] == "perplexity" or row["metric"] == "acc"]:
                density = None if unit is None else row["head_density" if unit == "heads" else "mlp_density"]
                rows.append({"selection": selection, "unit": unit, "density": density, **row})

    measure("dense", None, None, None)
    for selection in args.selection:
        for density in args.mlp_density:
            measure(args.mode, selection, "mlp", SparsityConfig(density, 1.0))
        for density in args.head_density:
            measure(args.mode, selection, "heads", SparsityConfig(1.0, density))
    return rows


if __name__ == "__main__":
    forget_script_folder()
    main()
