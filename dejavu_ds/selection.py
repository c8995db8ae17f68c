"""Choosing the units (neurons or heads) of one layer for one decode step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dejavu_ds.kernels.ops import Ops
from dejavu_ds.predictor import Predictor


class Selection(NamedTuple):
    """The kept units of a layer on this rank, for the whole batch.

    idx    [N] int32, ascending; valid up to the count
    count  [1] int32
    mask   [N] bool, the same set
    """

    idx: torch.Tensor
    count: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def all_of(cls, size: int, device: torch.device) -> "Selection":
        """Every one of `size` units."""
        return cls(
            idx=torch.arange(size, dtype=torch.int32, device=device),
            count=torch.full((1,), size, dtype=torch.int32, device=device),
            mask=torch.ones(size, dtype=torch.bool, device=device),
        )


class Selector:
    """Selects by a threshold on a predictor's logits, ahead of the block that uses the result.

    `begin` is called where the predictor's input exists (its tap), `join` where the selection is needed; on a GPU the
    work in between runs on a stream of its own. A threshold and not a top-k: a neuron's fate depends on its own logit
    alone, so it is the same on every rank and at every tensor-parallel size.

    Args:
        predictor: its rows for the units of this rank.
        threshold: units with a logit strictly above it are kept.
        ops: the kernels or their torch twins.
        stream: the CUDA stream for the prediction; None runs it in line.
    """

    def __init__(self, predictor: Predictor, threshold: float, ops: Ops, stream: "torch.cuda.Stream | None") -> None:
        self.predictor = predictor
        self.threshold = threshold
        self.size = predictor.w2.shape[0]
        device = predictor.w2.device
        self._ops = ops
        self._stream = stream
        self._input: torch.Tensor | None = None
        self._selection = Selection.all_of(self.size, device)
        self.kept_total = torch.zeros(1, dtype=torch.int64, device=device)
        """Units kept since the last reset, summed over the steps."""

    def begin(self, x: torch.Tensor, live: torch.Tensor) -> None:
        """Start selecting from the tap `x` [B, D]; only sequences with `live` [B] bool have a say."""
        if self._stream is None:
            self._select(x, live)
            return
        self._input = x  # until joined, so that the allocator does not hand its memory to the main stream
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._select(x, live)

    def join(self) -> Selection:
        """The selection; the current stream waits for it, the host does not."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._input = None
        return self._selection

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """The choice of each token on its own, [..., D] -> [..., N] bool; no union over a batch."""
        return self.predictor.logits(x).float() > self.threshold

    def _select(self, x: torch.Tensor, live: torch.Tensor) -> None:
        idx, count, mask = self._selection
        self._ops.select(self.predictor.logits(x), self.threshold, live, idx, count, mask)
        self.kept_total += count


def begin_all(selectors: Sequence[Selector], x: torch.Tensor, live: torch.Tensor) -> None:
    """Start every selector that listens at one tap."""
    for selector in selectors:
        selector.begin(x, live)
