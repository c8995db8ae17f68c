"""Sizes of models to benchmark: the published OPTs by name, any other by its numbers or its config.json."""

from dataclasses import dataclass, fields
from pathlib import Path

from transformers import AutoConfig, OPTConfig


@dataclass(frozen=True)
class Shape:
    """A pre-norm OPT. Names in `hidden=64,ffn=256,heads=4,layers=2,vocab=512` are those of the fields."""

    name: str
    hidden: int
    ffn: int
    heads: int
    layers: int
    vocab: int = 50272
    positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def block_parameters(self) -> int:
        """Weights, biases and norms of one decoder layer."""
        D, F = self.hidden, self.ffn
        return 4 * (D * D + D) + 2 * D * F + F + D + 4 * D

    def config(self) -> OPTConfig:
        """Of the Hugging Face model of these sizes."""
        return OPTConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            word_embed_proj_dim=self.hidden,
            ffn_dim=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=self.positions,
            dropout=0.0,
            do_layer_norm_before=True,
            activation_function="relu",
        )


# (hidden, ffn, heads, layers); opt-350m is post-norm and left out: shapes here are pre-norm.
_PUBLISHED = {
    "opt-125m": (768, 3072, 12, 12),
    "opt-1.3b": (2048, 8192, 32, 24),
    "opt-2.7b": (2560, 10240, 32, 32),
    "opt-6.7b": (4096, 16384, 32, 32),
    "opt-13b": (5120, 20480, 40, 40),
    "opt-30b": (7168, 28672, 56, 48),
    "opt-66b": (9216, 36864, 72, 64),
    "opt-175b": (12288, 49152, 96, 96),
}
SHAPES = {name: Shape(name, *sizes) for name, sizes in _PUBLISHED.items()}


def parse_shape(text: str) -> Shape:
    """A published name, `hidden=...,ffn=...,heads=...,layers=...[,vocab=...,positions=...]`, or a folder with a
    config.json.

    Raises:
        ValueError: an unknown name, with the known ones; sizes that are missing, not whole or do not fit together.
    """
    if text.lower() in SHAPES:
        return SHAPES[text.lower()]
    if "=" in text:
        return _from_numbers(text)
    if (Path(text) / "config.json").is_file():
        return shape_of(AutoConfig.from_pretrained(text), Path(text).resolve().name)
    raise ValueError(
        f"unknown shape {text!r}; known are {', '.join(SHAPES)}, a folder with a config.json, or numbers such as "
        "hidden=64,ffn=256,heads=4,layers=2,vocab=512"
    )


def parse_local_shape(text: str) -> tuple[Shape, int]:
    """`SHAPE` or `SHAPE/TP`, one rank's share of it: the shape and the number of ranks.

    Raises ValueError for what `parse_shape` refuses, and for heads or neurons that do not divide by the ranks.
    """
    name, slash, ranks = text.rpartition("/")
    if not slash or not ranks.isdecimal():
        return parse_shape(text), 1
    shape, tp = parse_shape(name), int(ranks)
    if tp < 1 or shape.heads % tp or shape.ffn % tp:
        raise ValueError(f"{shape.heads} heads and {shape.ffn} neurons of {shape.name} do not divide by {tp} ranks")
    return shape, tp


def shape_of(config, name: str) -> Shape:
    """The sizes of a Hugging Face OPT configuration."""
    return Shape(
        name,
        hidden=config.hidden_size,
        ffn=config.ffn_dim,
        heads=config.num_attention_heads,
        layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
    )


def _from_numbers(text: str) -> Shape:
    names = [field.name for field in fields(Shape) if field.name != "name"]
    given = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key.strip() not in names or not value.strip().isdecimal() or int(value) < 1:
            raise ValueError(f"{item!r} in shape {text!r} is not NAME=VALUE with one of {', '.join(names)}, from 1 on")
        given[key.strip()] = int(value)
    missing = [name for name in names if name not in given and name not in ("vocab", "positions")]
    if missing:
        raise ValueError(f"shape {text!r} lacks {', '.join(missing)}")
    if given["hidden"] % given["heads"]:
        raise ValueError(f"hidden {given['hidden']} does not divide by {given['heads']} heads")
    return Shape(text, **given)
