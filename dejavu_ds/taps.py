"""Where a predictor's input is taken: the one definition that collection and run time share.

Deja Vu (Liu et al. 2023, arXiv:2310.17157, section 4.3) predicts ahead of time, because the residual stream
changes slowly from block to block. A set can then be chosen while an earlier unit is still being computed.
"""

from typing import NamedTuple

LOOKAHEADS = ("half", "full", "none")
UNITS = ("mlp", "heads")


class Tap(NamedTuple):
    """A place in the model: the input of one unit of one decoder block, [..., D].

    `point` is "attention" (what q, k and v read) or "mlp" (what fc1 reads). In a pre-norm block that is the
    output of the layer norm before the unit. In a post-norm block it is the residual stream itself: for "mlp" the
    output of the norm over the attention's sum, for "attention" that of the norm which ends the block before, and in
    block 0, which has no block before it, the sum of the embeddings.
    """

    layer: int
    point: str


def tap_of(unit: str, layer: int, lookahead: str) -> Tap:
    """Return where the predictor of `unit` ("mlp" or "heads") in block `layer` takes its input.

    | lookahead | mlp of block l           | heads of block l         |
    |-----------|--------------------------|--------------------------|
    | none      | block l, its MLP         | block l, its attention   |
    | half      | block l, its attention   | block l-1, its MLP       |
    | full      | block l-1, its attention | block l-1, its attention |

    Block 0 has no block before it: there l-1 is replaced by its own attention input.
    Raises ValueError for another unit, another lookahead or a negative layer.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {UNITS}, got {unit!r}")
    if lookahead not in LOOKAHEADS:
        raise ValueError(f"lookahead must be one of {LOOKAHEADS}, got {lookahead!r}")
    if layer < 0:
        raise ValueError(f"layer must be 0 or more, got {layer}")
    if lookahead == "none":
        return Tap(layer, "mlp" if unit == "mlp" else "attention")
    if lookahead == "half" and unit == "mlp":
        return Tap(layer, "attention")
    if layer == 0:
        return Tap(0, "attention")
    return Tap(layer - 1, "mlp" if lookahead == "half" else "attention")
