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
    """Chooses the units of one layer, ahead of the block that uses the result.

    `begin` is called where the choice's input exists (its tap), `join` where the selection is needed. A subclass says
    what a token keeps in `keep`; that alone makes a selector, without speed. `PredictorSelector` is the fast one.

    Args:
        size: units N of this rank.
        device: where the selection lives.
    """

    of_outputs = False
    """Whether `keep` and `begin` take the unit's true outputs, inside the unit, and no tap's input: an oracle's way."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._selection = Selection.all_of(size, device)
        self.kept_total = torch.zeros(1, dtype=torch.int64, device=device)
        """Units kept since the last reset, summed over the steps."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a choice reads."""
        return 0

    def begin(self, x: torch.Tensor, live: torch.Tensor) -> None:
        """Start selecting from the tap `x` [B, D]; only sequences with `live` [B] bool have a say."""
        idx, count, mask = self._selection
        mask.copy_((self.keep(x) & live[:, None]).any(0))
        kept = mask.nonzero().flatten()
        idx[: len(kept)] = kept.int()
        count.fill_(len(kept))
        self.kept_total += count

    def join(self) -> Selection:
        """The selection; the current stream waits for it, the host does not."""
        return self._selection

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """The choice of each token on its own, [..., D] -> [..., N] bool; no union over a batch."""
        raise NotImplementedError


class PredictorSelector(Selector):
    """Selects by a threshold on a predictor's logits.

    On a GPU the work between `begin` and `join` runs on a stream of its own. A threshold and not a top-k: a neuron's
    fate depends on its own logit alone, so it is the same on every rank and at every tensor-parallel size.

    Args:
        predictor: its rows for the units of this rank.
        threshold: units with a logit strictly above it are kept.
        ops: the kernels or their torch twins.
        stream: the CUDA stream for the prediction; None runs it in line.
    """

    def __init__(self, predictor: Predictor, threshold: float, ops: Ops, stream: "torch.cuda.Stream | None") -> None:
        super().__init__(predictor.units, predictor.w2.device)
        self.predictor = predictor
        self.threshold = threshold
        self._ops = ops
        self._stream = stream
        self._input: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.predictor.parameters())

    def begin(self, x: torch.Tensor, live: torch.Tensor) -> None:
        if self._stream is None:
            self._select(x, live)
            return
        self._input = x  # until joined, so that the allocator does not hand its memory to the main stream
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._select(x, live)

    def join(self) -> Selection:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._input = None
        return self._selection

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return self.predictor.logits(x).float() > self.threshold

    def _select(self, x: torch.Tensor, live: torch.Tensor) -> None:
        idx, count, mask = self._selection
        self._ops.select(self.predictor.logits(x), self.threshold, live, idx, count, mask)
        self.kept_total += count


def begin_all(selectors: Sequence[Selector], x: torch.Tensor, live: torch.Tensor) -> None:
    """Start every selector that listens at one tap."""
    for selector in selectors:
        selector.begin(x, live)
