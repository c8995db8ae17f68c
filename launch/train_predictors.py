"""Train the predictors of a model and save them, with a table of how good they are.

A model that does not fit one GPU is split over several: deepspeed --num_gpus 4 launch/train_predictors.py ...
"""

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from dejavu_ds.checkpoint import bundled_model, load_model, open_checkpoint
from dejavu_ds.criteria import CRITERIA, HEAD_LOSSES, MLP_WEIGHTS
from dejavu_ds.launch.common import (
    Parser,
    positive_float,
    positive_int,
    rank,
    run_program,
    share,
    world_size,
)
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.promise import keep_promise
from dejavu_ds.sharded import DenseModel
from dejavu_ds.sources import documents_of, sampled_documents
from dejavu_ds.storage import CONFIG_FILE
from dejavu_ds.taps import LOOKAHEADS, UNITS
from dejavu_ds.train import remove_checkpoint, split_windows, train_predictors
from dejavu_ds.train_config import UNIT_CHOICES, TrainConfig

_TERMS = """\
terms:
  label      what a predictor learns to say. A neuron is labelled active if its pre-activation is above --mlp-threshold,
             a head if it is among the --head-label-density share of heads with the largest score for the token. With
             --head-loss size heads learn the score itself, its share of the residual stream, and labels only count
  criterion  the score of a head. norm: of its output; contribution: norm of its output after the output projection;
             plainact: sum over its outputs of |activation * gradient| of the language-model loss
  threshold  a unit (neuron or head) is kept if its predicted logit is strictly above the layer's threshold; thresholds
             come from a table of the logits' quantiles on validation text, so any density can be asked for later
  density    kept / all
  recall     share of the active units that are kept
  precision  share of the kept units that are active
  error      squared norm of what the dropped units would have added to the residual stream, over the squared norm of
             the stream after the block
  kept       share of the unit's output that is kept: 1 - error / (error with every unit dropped)
"""
# Of the training text, to find the densities of a promise on.
_FINDING_TOKENS = 16384


def main(argv: list[str] | None = None) -> None:
    """Parse, train, save, report."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.data is None) != args.data_free:
        parser.error("give text with --data, or --data-free to let the model write it")
    if world_size() > 1 and args.max_perplexity_increase is not None:
        parser.error(f"--max-perplexity-increase runs in one process, the launcher started {world_size()}")
    run_program(parser, run, args)


def run(args) -> None:
    """Train on the documents, save the set, print how good it is."""
    config = TrainConfig(**{name: getattr(args, name) for name in _CONFIG_ARGUMENTS})
    if (Path(args.out) / CONFIG_FILE).exists():
        raise ValueError(f"--out {args.out} holds a finished set ({CONFIG_FILE}): choose another folder or remove it")
    try:
        predictors = _train(args, config)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_go_on(args.out)) from None
    if rank():
        return
    remove_checkpoint(args.out)
    _print_report(predictors, Console())
    print(f"saved {predictors.num_parameters():,} parameters in {args.dtype} to {args.out}")


def _train(args, config: TrainConfig) -> PredictorSet:
    """The set, which rank 0 has saved."""
    # Text first: a wrong name should not wait for the model.
    documents = None if args.data_free else documents_of(args.data, args.samples)
    # Not after an hour's training that the folder turns out to be impossible.
    Path(args.out).mkdir(parents=True, exist_ok=True)
    dense = _load(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if documents is None:
        length = min(2 * config.context, dense.model.config.max_position_embeddings)
        documents = sampled_documents(dense.model, tokenizer, args.samples, length, config.seed)
    data_name = "sampled from the model" if args.data_free else Path(args.data).name
    predictors = train_predictors(dense, tokenizer, documents, config, data_name, args.out, args.save_minutes)
    if rank() == 0:
        if args.max_perplexity_increase is not None:
            _promise(dense, predictors, tokenizer, documents, config, args.max_perplexity_increase)
        predictors.save_pretrained(args.out, getattr(torch, args.dtype))
    return predictors


def _how_to_go_on(folder: str) -> str:
    """What to say of a training that was interrupted before its set was saved."""
    written = [path.stat().st_mtime for path in Path(folder).glob("training*.safetensors")]
    if not written:
        return "interrupted before the first checkpoint: the same command begins anew"
    when = time.strftime("%H:%M", time.localtime(max(written)))
    return f"interrupted; the same command goes on from the checkpoint of {when}"


def _load(args) -> DenseModel:
    """The model, over all processes that the launcher started."""
    device = _device(args.device)
    # CPUs compute quicker in fp32.
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    if world_size() > 1:
        return DenseModel.split(*open_checkpoint(args.model, dtype))
    return DenseModel.of(load_model(args.model, dtype).to(device))


def _promise(dense: DenseModel, predictors: PredictorSet, tokenizer, documents, config, increase: float) -> None:
    finding, confirming = split_windows(documents, tokenizer, config)
    finding = finding[: max(1, _FINDING_TOKENS // config.context)]
    promise = keep_promise(dense.model, predictors, finding, confirming, increase)
    found = ", ".join(f"{unit} density {density:g}" for unit, density in promise["densities"].items())
    print(f"perplexity rises by {promise['confirmed']:.2%} on validation text at {found}")


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


def _percentage(text: str) -> float:
    """An argument's type: "1%" or "0.01"."""
    return positive_float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def _auto_or_share(text: str) -> float | str:
    return text if text == "auto" else share(text)


# Options that go to TrainConfig under their own names: type or choices, and help.
_CONFIG_ARGUMENTS = {
    "lookahead": (LOOKAHEADS, "where predictors take their input"),
    "units": (UNIT_CHOICES, "predictors to train; the other unit then stays dense"),
    "criterion": (CRITERIA, "which heads are needed"),
    "head_loss": (
        HEAD_LOSSES,
        "heads learn how large the score is, or a label (default: size; label for plainact)",
    ),
    "head_label_density": (float, "share of heads labelled as needed"),
    "mlp_threshold": (float, "neurons with a pre-activation above it are labelled active"),
    "mlp_weight": (MLP_WEIGHTS, "what an active neuron counts by; plainact takes a backward pass"),
    "max_parameters": (share, "predictors' parameters over the blocks', spread over the layers by need"),
    "rank": (int, "of every layer's MLP predictor instead, heads get half"),
    "epochs": (int, "passes over the text, at most"),
    "patience": (int, "a predictor stops after so many passes without keeping more of its unit's output"),
    "mlp_target_density": (share, "mean density at which that is judged for neurons"),
    "head_target_density": (share, "the same for heads"),
    "seed": (int, "of weights, order and sampled text"),
    "context": (int, "tokens in a window"),
    "buffer_tokens": (int, "tokens in a round, takes 2 * layers * (3 * hidden + ffn) bytes each"),
    "first_layer_density": (_auto_or_share, "1: dense; auto: the least whose error is small"),
}


def _parser() -> Parser:
    parser = Parser(prog="train_predictors.py", description=__doc__, epilog=_TERMS)
    add = parser.add_argument
    add("--model", default=bundled_model(), help="folder or hub name (default: the bundled opt-7m)")
    add(
        "--data",
        help='text: .jsonl with "text" fields, .txt with blank lines between documents, or a data set of the hub, '
        "organisation/name[:configuration][:split]",
    )
    add("--data-free", action="store_true", help="let the model itself write the text, at temperature 1")
    add("--samples", type=positive_int, default=500, help="documents to use (default: %(default)s)")
    add("--out", required=True, help="folder for a new set; holds a checkpoint while training, to go on with")
    add(
        "--save-minutes",
        type=float,
        default=5.0,
        help="between checkpoints, at the end of a round (default: %(default)s)",
    )
    for name, (kind, text) in _CONFIG_ARGUMENTS.items():
        choice = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        default = getattr(TrainConfig, name)  # as declared: an instance has made up what depends on other values
        shown = "" if default is None else f" (default: {default})"
        add(f"--{name.replace('_', '-')}", default=default, help=text + shown, **choice)
    add(
        "--max-perplexity-increase",
        type=_percentage,
        help="e.g. 1%%: store as default the densities that keep it at the fewest bytes, found on training text and "
        "confirmed on validation text",
    )
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="stored (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: %(default)s)")
    return parser


def _print_report(predictors: PredictorSet, console: Console) -> None:
    """One table a unit kind, at its default density, or .5 where that is dense."""
    for unit in UNITS:
        if not any(predictors.of(unit)):
            print(f"{unit}: dense in every layer")
            continue
        default = predictors.default_density(unit)
        shown = default if default < 1 else 0.5
        table = Table(title=f"{unit}: default density {default}; at mean density {shown}")
        for column in ("layer", "active", "rank", "density", "recall", "precision", "error", "kept"):
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
            values = [f"{curve[name][at]:.4f}" for name in ("recall", "precision", "error", "kept")]
            table.add_row(str(layer), f"{curve['active']:.3f}", str(predictor.rank), f"{density:.2f}", *values)
        console.print(table)


if __name__ == "__main__":
    main()
