"""Perplexity of a model on a text: dense, masked at every position, and through the decode step."""

import json
import platform
import sys
from pathlib import Path

from dejavu_ds.launch.common import (
    DTYPES,
    Parser,
    leave_job,
    positive_int,
    quiet_imports,
    quiet_other_ranks,
    rank,
    reported_errors,
    set_cpu_threads,
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
Densities in the table are those realised, over all layers; the one asked for is the mean over layers 1 and up.
"""


def build_parser() -> Parser:
    parser = Parser(prog="evaluate.py", description=__doc__, epilog=EPILOG)
    parser.add_argument("--model", help="folder or hub name of an OPT (default: the bundled trained 7 M model)")
    parser.add_argument("--predictors", help="folder or hub id of its predictors (default: those of the bundled model)")
    parser.add_argument("--data", required=True, help='text: .jsonl with "text" fields, or .txt')
    parser.add_argument("--mode", nargs="+", choices=("dense", "masked", "decode"), default=["dense", "decode"])
    parser.add_argument("--mlp-density", type=share, help="share of MLP neurons to keep, (0, 1] (default: the set's)")
    parser.add_argument("--head-density", type=share, help="share of heads to keep, (0, 1] (default: the set's)")
    parser.add_argument("--dense", action="store_true", help="no predictors; only --mode dense makes sense")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: fp32 on CPU, else as stored")
    parser.add_argument("--context", type=positive_int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--windows", type=positive_int, help="use only the first so many windows (default: all)")
    parser.add_argument("--out", help="file for the results as JSON")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse, load, measure, report."""
    parser = build_parser()
    args = parser.parse_args(argv)
    with quiet_imports():
        import dejavu_ds.engine  # noqa: F401  (slow to import: after the arguments have been checked)
    quiet_other_ranks()
    set_cpu_threads()
    with reported_errors(parser.prog):
        run(args)
    leave_job()


def run(args) -> None:
    """Measure every mode and print a table."""
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoTokenizer

    import dejavu_ds
    from dejavu_ds.checkpoint import bundled_model
    from dejavu_ds.evaluate import perplexity
    from dejavu_ds.text import cut_windows, read_documents, token_ids

    model = str(bundled_model()) if args.model is None else args.model
    documents = read_documents(args.data)
    engine = dejavu_ds.init_inference(
        model,
        predictors=choose_predictors(args),
        sparsity=None if args.dense else dejavu_ds.SparsityConfig(args.mlp_density, args.head_density),
        tensor_parallel={"tp_size": world_size()},
        **({} if (dtype := torch_dtype(args.dtype)) is None else {"dtype": dtype}),
    )
    windows = cut_windows(token_ids(documents, AutoTokenizer.from_pretrained(model)), args.context)[: args.windows]
    rows = []
    for mode in args.mode:
        result = perplexity(engine, windows, mode, progress=rank() == 0)
        rows.append(row_of(engine, mode, Path(model).name, result))
    if rank():
        return
    table = Table("mode", "perplexity", "stderr", "MLP density", "head density", "tokens")
    for row in rows:
        densities = [f"{row[key]:.3f}" for key in ("mlp_density", "head_density")]
        table.add_row(row["mode"], f"{row['value']:.3f}", f"{row['stderr']:.3f}", *densities, str(row["tokens"]))
    Console().print(table)
    if args.out:
        results = {"conditions": conditions(engine, args), "rows": rows}
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


def row_of(engine, mode: str, model: str, result) -> dict:
    """One flat row of results."""
    predictors = engine.predictors if mode != "dense" else None
    return {
        "model": model,
        "mode": mode,
        "selection": None if predictors is None else "predictor",
        "criterion": None if predictors is None else predictors.metadata.get("criterion"),
        "lookahead": None if predictors is None else predictors.lookahead,
        "mlp_density": result.mlp_density,
        "head_density": result.head_density,
        "quantize": None,
        "task": "perplexity",
        "value": result.value,
        "stderr": result.stderr,
        "tokens": result.tokens,
    }


def conditions(engine, args) -> dict:
    """What the figures were measured under."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else platform.machine()
    return {
        "device": device,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "tp": world_size(),
        "context": args.context,
        "data": Path(args.data).name,
        "asked": {"mlp_density": args.mlp_density, "head_density": args.head_density},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": " ".join(["launch/evaluate.py", *(arg for arg in sys.argv[1:] if "local" not in arg)]),
    }


if __name__ == "__main__":
    main()
