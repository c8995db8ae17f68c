"""Generate text with contextual sparsity: `deepspeed --num_gpus N launch/generate.py`."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

from dejavu_ds.launch import interactive
from dejavu_ds.launch.common import (
    DTYPES,
    Parser,
    add_quantize,
    positive_float,
    positive_int,
    quantize_config,
    rank,
    run_program,
    share,
    shared_by_rank_0,
    torch_dtype,
    world_size,
)
from dejavu_ds.launch.prompts import generate_all, parse_prompts, write_all

SAMPLE_PROMPT = "The king sat down and"

EPILOG = """\
density and threshold:
  Density is the share of neurons or heads that a token keeps; sparsity is 1 - density. Asking for a density sets a
  threshold in every layer: a unit is kept when its predictor's logit lies above it. The thresholds come from a table
  of logit quantiles that was measured on calibration text, so the density realised varies from token to token around
  the one asked for; the closing line gives what was realised. The density asked for is the mean over layers 1 and up;
  layer 0, whose input changes most, has a budget of its own in the predictor set.

  --mlp-density .2     a fifth of the neurons          --mlp-density 1    every neuron
  --head-density .5    half of the heads               --head-density 1   every head
  --dense              no predictors at all: Hugging Face's own result

many prompts:
  --prompt-file prompts.jsonl          an object with a "prompt" (or "text") string in every line
  --prompt-file prompts.txt --lines    a prompt in every line
  Each gives {"prompt": ..., "text": ..., "new_tokens": ...}, in their order. A batch reads the union of what its
  prompts need, so with predictors a text can differ from the one that the prompt gives alone.
"""


def build_parser() -> Parser:
    parser = Parser(prog="generate.py", description=__doc__, epilog=EPILOG)
    parser.add_argument("--model", help="folder or hub name of an OPT (default: the bundled trained 7 M model)")
    parser.add_argument("--predictors", help="folder or hub id of its predictors (default: those of the bundled model)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help=f"text to continue, - for standard input (default: {SAMPLE_PROMPT!r})")
    source.add_argument(
        "--prompt-file",
        help="file whose text to continue, - for standard input; many prompts if it is a .jsonl or with --lines",
    )
    source.add_argument(
        "--interactive",
        action="store_true",
        help="a prompt line with history; every line goes on from the text before, whose cache is kept; Ctrl-D ends it",
    )
    batches = parser.add_argument_group("many prompts (each answered by a JSON line)")
    batches.add_argument("--lines", action="store_true", help="every line of --prompt-file is a prompt")
    batches.add_argument("--batch-size", type=positive_int, help="prompts at once (default: 8)")
    batches.add_argument("--out", help="file for the JSON lines (default: standard output)")
    parser.add_argument("--mlp-density", type=share, help="share of MLP neurons to keep, (0, 1] (default: the set's)")
    parser.add_argument("--head-density", type=share, help="share of heads to keep, (0, 1] (default: the set's)")
    parser.add_argument("--lookahead", choices=("half", "full", "none"), help="refuse predictors of another lookahead")
    parser.add_argument(
        "--mode",
        choices=("gather", "auto", "masked"),
        default="gather",
        help="gather: read the kept weights only; auto: do so where a measurement says that it is faster; masked: "
        "dense arithmetic with zeros, to compare with (default: %(default)s)",
    )
    parser.add_argument("--dense", action="store_true", help="every head and neuron, no predictors")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: fp32 on CPU, else as stored")
    add_quantize(parser)
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, help="default: %(default)s")
    sampling = parser.add_argument_group("sampling (greedy without any of these)")
    sampling.add_argument("--sample", action="store_true", help="sample at temperature 1")
    sampling.add_argument("--temperature", type=positive_float, help="divides the logits; implies --sample")
    sampling.add_argument("--top-k", type=positive_int, help="the k likeliest tokens only; implies --sample")
    sampling.add_argument("--top-p", type=share, help="the likeliest tokens of this mass only; implies --sample")
    sampling.add_argument("--repetition-penalty", type=positive_float, help="applies to greedy search too")
    sampling.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--stats", action="store_true", help="densities layer by layer at the end")
    parser.add_argument(
        "--json",
        action="store_true",
        help="end with one JSON object in a line of its own; docs/compatibility.md names its keys",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse, load, generate, report."""
    parser = build_parser()
    args = parser.parse_args(argv)
    run_program(parser, run, args)


def run(args) -> None:
    """Load the engine and generate: one continuation that is streamed, those of many prompts, or turn after turn."""
    from transformers import set_seed

    check_together(args)
    many = many_prompts(args)
    prompts = [] if args.interactive else shared_by_rank_0(lambda: read_prompts(args) if many else [read_prompt(args)])
    engine, tokenizer = load(args)
    set_seed(args.seed)
    with held_messages():
        figures = generate_text(engine, tokenizer, prompts, many, args)
    report = engine.stats.report()
    if rank() == 0:
        # Standard output may be the lines of many prompts, and nothing else.
        with contextlib.redirect_stdout(sys.stderr if many and args.out is None else sys.stdout):
            print_figures(figures, report, args)


@contextlib.contextmanager
def held_messages() -> Iterator[None]:
    """Keep what the package logs until the end, since it would land in the middle of the streamed text."""
    logger = logging.getLogger("dejavu_ds")
    held = MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, target=logging.StreamHandler())
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(held)
    try:
        yield
    finally:
        logger.removeHandler(held)
        logger.propagate = propagated
        held.close()


def generate_text(engine, tokenizer, prompts: list[str], many: bool, args) -> dict:
    """What --json gives, without what `print_figures` takes from the engine's report."""
    from transformers import TextStreamer

    figures = {"prompt": None, "text": None}
    if args.interactive:
        conversation = interactive.Conversation(engine, tokenizer, args.max_new_tokens, sampling_options(args))
        interactive.converse(conversation, lambda: TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        new_tokens, seconds = conversation.new_tokens, conversation.seconds
    elif many:
        start = time.perf_counter()
        batches = generate_all(
            engine, tokenizer, prompts, args.batch_size or 8, args.max_new_tokens, sampling_options(args)
        )
        new_tokens = write_all(batches, len(prompts), args.out)
        seconds = time.perf_counter() - start
    else:
        figures["prompt"] = prompts[0]
        figures["text"], new_tokens, seconds = continue_one(engine, tokenizer, prompts[0], args)
    return {**figures, "new_tokens": new_tokens, "tokens_per_s": new_tokens / seconds if seconds else 0.0}


def load(args):
    """The engine that the arguments ask for, and its tokenizer."""
    from transformers import AutoTokenizer

    import dejavu_ds
    from dejavu_ds.checkpoint import bundled_model

    model = str(bundled_model()) if args.model is None else args.model
    engine = dejavu_ds.init_inference(
        model,
        predictors=choose_predictors(args),
        sparsity=None if args.dense else sparsity_of(args),
        quantize=quantize_config(args),
        tensor_parallel={"tp_size": world_size()},
        **({} if (dtype := torch_dtype(args.dtype)) is None else {"dtype": dtype}),
    )
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return engine, tokenizer


def continue_one(engine, tokenizer, prompt: str, args) -> tuple[str, int, float]:
    """Stream one continuation; returns it with its tokens and its seconds."""
    import torch
    from transformers import TextStreamer

    from dejavu_ds.generation import check_length

    inputs = tokenizer(prompt, return_tensors="pt").to(engine.device)
    positions = torch.arange(inputs.input_ids.shape[1])
    check_length(positions, args.max_new_tokens, engine.max_positions)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if rank() == 0 else None
    start = time.perf_counter()
    ids = engine.generate(**inputs, max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling_options(args))
    seconds = time.perf_counter() - start
    new = ids[0, inputs.input_ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), len(new), seconds


def many_prompts(args) -> bool:
    """Whether the prompt file is one of many."""
    return args.prompt_file is not None and (args.lines or Path(args.prompt_file).suffix == ".jsonl")


def check_together(args) -> None:
    """ValueError for options that mean nothing beside each other."""
    many = many_prompts(args)
    for name in ("lines", "out", "batch_size"):
        if getattr(args, name) and not many:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for many prompts: give --prompt-file with --lines, or a .jsonl file")
    if args.json and (many or args.interactive):
        raise ValueError(f"--json is for one prompt; drop it with {'many' if many else '--interactive'}")
    if args.out is not None and not Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {Path(args.out).parent}; make it first")


def sparsity_of(args):
    """What the arguments ask to keep."""
    from dejavu_ds import SparsityConfig

    return SparsityConfig(args.mlp_density, args.head_density, args.lookahead, args.mode)


def read_text(path: str) -> str:
    """What a file holds, or standard input; ValueError if it cannot be read."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        where = "standard input" if path == "-" else f"the prompt file {path!r}"
        way_out = "; give text in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ValueError(f"{where} cannot be read: {error}{way_out}") from error


def read_prompt(args) -> str:
    """The prompt's text; ValueError for one that is empty or cannot be read."""
    if args.prompt_file is not None:
        text = read_text(args.prompt_file)
    elif args.prompt == "-":
        text = read_text("-")
    else:
        text = SAMPLE_PROMPT if args.prompt is None else args.prompt
    text = text.strip("\n")
    if not text.strip():
        raise ValueError(f"the prompt is empty ({len(text)} characters); give some text to continue")
    return text


def read_prompts(args) -> list[str]:
    """Those of a file of many."""
    where = "standard input" if args.prompt_file == "-" else args.prompt_file
    return parse_prompts(read_text(args.prompt_file), where, json_lines=not args.lines)


def choose_predictors(args) -> str | None:
    """The predictor set to load; None for dense. ValueError where neither can be meant."""
    from dejavu_ds.checkpoint import bundled_model

    if args.dense:
        names = ("predictors", "mlp_density", "head_density", "lookahead")
        given = [name for name in names if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--dense and --{given[0].replace('_', '-')} exclude each other; drop one")
        return None
    if args.predictors is not None:
        return args.predictors
    if args.model is None:
        return str(bundled_model() / "predictors")
    raise ValueError(
        f"no predictors for --model {args.model}: give --predictors, train some with launch/train_predictors.py, "
        "or run --dense"
    )


def sampling_options(args) -> dict:
    """Keywords for `generate`."""
    options = {
        name: value
        for name in ("temperature", "top_k", "top_p", "repetition_penalty")
        if (value := getattr(args, name)) is not None
    }
    sampled = args.sample or any(name in options for name in ("temperature", "top_k", "top_p"))
    return {"do_sample": sampled, **options}


def print_figures(figures: dict, report, args) -> None:
    """The closing line, the table of --stats and the object of --json."""
    kept = "no decode step, which alone is sparse"
    if report.steps:
        kept = (
            f"kept {report.mlp_density:.3f} of the MLP neurons (mean over all layers; layer 0 is "
            f"{report.mlp_by_layer[0]:.3f}) and {report.head_density:.3f} of the heads; read "
            f"{report.weight_bytes_read / 1e6:.2f} MB of weights a token, {report.share_read:.3f} of the dense "
            f"{report.dense_weight_bytes / 1e6:.2f} MB"
        )
    print(
        f"\n{figures['new_tokens']} token(s), {figures['tokens_per_s']:.1f} tokens/s with the prefill on "
        f"{world_size()} rank(s); {kept}"
    )
    if args.stats and report.steps:
        print_layers(report)
    if args.json:
        figures = {
            **figures,
            # None after a single token: it comes from the dense prefill.
            "mlp_density": report.mlp_density,
            "head_density": report.head_density,
            "weight_bytes_read": report.weight_bytes_read,
            "tp": world_size(),
            "quantize": args.quantize,
        }
        print(json.dumps(figures), flush=True)


def print_layers(report) -> None:
    """Densities layer by layer."""
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "MLP density", "head density", title=f"kept, mean of {report.steps} decode step(s)")
    for i, (mlp, heads) in enumerate(zip(report.mlp_by_layer, report.heads_by_layer, strict=True)):
        table.add_row(str(i), f"{mlp:.3f}", f"{heads:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
