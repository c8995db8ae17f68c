"""Train the predictors of a model and save them, with a table of how good they are."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from dejavu_ds.checkpoint import bundled_model, load_model
from dejavu_ds.launch.common import Parser, positive_int, reported_errors, world_size
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.taps import LOOKAHEADS, UNITS
from dejavu_ds.text import read_documents
from dejavu_ds.train import TrainConfig, train_predictors

_TERMS = """\
terms:
  label      what a predictor learns to say. A neuron is labelled active if its pre-activation is above zero, a head if
             it is among the --head-label-density share of heads with the largest output norm for the token
  threshold  a unit (neuron or head) is kept if its predicted logit is strictly above the layer's threshold; thresholds
             come from a table of the logits' quantiles on validation text, so any density can be asked for later
  density    kept / all
  recall     share of the active units that are kept
  precision  share of the kept units that are active
  error      squared norm of what the dropped units would have added to the residual stream, over the squared norm of
             the stream after the block
"""


def main(argv: list[str] | None = None) -> None:
    """Parse, train, save, report."""
    parser = _parser()
    args = parser.parse_args(argv)
    if world_size() > 1:
        parser.error(f"training runs in one process, the launcher started {world_size()}: use --num_gpus 1 or none")
    with reported_errors(parser.prog):
        run(args)


def run(args) -> None:
    """Train on the documents, save the set, print how good it is."""
    documents = read_documents(args.data, args.samples)
    config = TrainConfig(
        lookahead=args.lookahead,
        rank=args.rank,
        epochs=args.epochs,
        seed=args.seed,
        context=args.context,
        buffer_tokens=args.buffer_tokens,
        head_label_density=args.head_label_density,
        first_layer_density=args.first_layer_density,
    )
    device = _device(args.device)
    # Not after an hour's training that the folder turns out to be impossible.
    Path(args.out).mkdir(parents=True, exist_ok=True)
    # CPUs compute quicker in fp32.
    model = load_model(args.model, torch.float32 if device.type == "cpu" else torch.float16)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    predictors = train_predictors(model.to(device), tokenizer, documents, config, data_name=Path(args.data).name)
    predictors.save_pretrained(args.out, getattr(torch, args.dtype))
    _print_report(predictors, Console())
    print(f"saved {predictors.num_parameters():,} parameters in {args.dtype} to {args.out}")


def _device(name: str) -> torch.device:
    """--device as torch has it; ValueError for one that is not there."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < gpus):
        return device
    raise ValueError(f"no device {name!r} here: use auto, cpu, or one of {gpus} CUDA device(s) counted from cuda:0")


def _parser() -> Parser:
    defaults = TrainConfig()
    parser = Parser(prog="train_predictors.py", description=__doc__, epilog=_TERMS)
    add = parser.add_argument
    add("--model", default=bundled_model(), help="folder or hub name (default: the bundled opt-7m)")
    add("--data", required=True, help='text: .jsonl with "text" fields, or .txt with blank lines between documents')
    add("--samples", type=positive_int, default=500, help="documents to use (default: %(default)s)")
    add("--out", required=True, help="folder for predictors.safetensors and predictors.json")
    add("--lookahead", choices=LOOKAHEADS, default=defaults.lookahead, help="default: %(default)s")
    add("--rank", type=int, default=defaults.rank, help="of the MLP predictors, heads get half (default: %(default)s)")
    add("--epochs", type=int, default=defaults.epochs, help="default: %(default)s")
    add("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    add("--context", type=int, default=defaults.context, help="tokens in a window (default: %(default)s)")
    add(
        "--buffer-tokens",
        type=int,
        default=defaults.buffer_tokens,
        help="tokens in a round, takes 2 * layers * (3 * hidden + ffn) bytes each (default: %(default)s)",
    )
    add("--head-label-density", type=float, default=defaults.head_label_density, help="default: %(default)s")
    add("--first-layer-density", type=float, default=defaults.first_layer_density, help="default: %(default)s, dense")
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="stored (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: %(default)s)")
    return parser


def _print_report(predictors: PredictorSet, console: Console) -> None:
    """One table a unit kind, at its default density, or .5 where that is dense."""
    for unit in UNITS:
        default = predictors.default_density(unit)
        shown = default if default < 1 else 0.5
        table = Table(title=f"{unit}: default density {default}; at mean density {shown}")
        for column in ("layer", "active", "rank", "density", "recall", "precision", "error"):
            table.add_column(column, justify="right")
        rows = zip(
            predictors.of(unit),
            predictors.metadata["layers"][unit],
            predictors.densities(unit, shown),
            strict=True,
        )
        for layer, (predictor, curve, density) in enumerate(rows):
            if predictor is None:
                table.add_row(str(layer), "", "", "dense")
                continue
            at = min(range(len(curve["density"])), key=lambda i: abs(curve["density"][i] - density))
            values = [f"{curve[name][at]:.4f}" for name in ("recall", "precision", "error")]
            table.add_row(str(layer), f"{curve['active']:.3f}", str(predictor.rank), f"{density:.2f}", *values)
        console.print(table)


if __name__ == "__main__":
    main()
