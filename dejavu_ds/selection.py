"""Choosing the units (neurons or heads) of one layer for one decode step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from dejavu_ds.cache import DejaVuCache
from dejavu_ds.kernels.ops import Ops
from dejavu_ds.kernels.packed_ops import packed_ops_for
from dejavu_ds.packed_predictor import PackedPredictor
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
    capturable = False
    """Whether `begin` can be captured in a CUDA graph."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.unit = ""
        """"mlp" or "heads", once attached."""
        self.selection = Selection.all_of(size, device)
        """What was chosen last; `join` says when it is there."""
        self.kept_total = torch.zeros(1, dtype=torch.int64, device=device)
        """Units kept since the last reset, summed over the steps."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a choice reads."""
        return 0

    def begin(self, x: torch.Tensor, cache: DejaVuCache) -> None:
        """Start selecting from the tap `x` [B, D]; only sequences that are live in the cache have a say."""
        idx, count, mask = self.selection
        mask.copy_((self.keep(x) & cache.live[:, None]).any(0))
        kept = mask.nonzero().flatten()
        idx[: len(kept)] = kept.int()
        count.fill_(len(kept))
        self.kept_total += count

    def join(self) -> Selection:
        """The selection; the current stream waits for it, the host does not."""
        return self.selection

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """The choice of each token on its own, [..., D] -> [..., N] bool; no union over a batch."""
        raise NotImplementedError


def selects(selector: Selector | None, cache: DejaVuCache) -> bool:
    """Whether a unit's selector, if it has one, is asked in a step in that cache; else the unit runs dense."""
    return selector is not None and selector.unit not in cache.dense_units


class PredictorSelector(Selector):
    """Selects by a threshold on a predictor's logits.

    A threshold and not a top-k: a neuron's fate depends on its own logit alone, so it is the same on every rank and at
    every tensor-parallel size. `Listeners` runs the first layer, for all predictors of a tap together.

    Args:
        predictor: its rows for the units of this rank.
        threshold: units with a logit strictly above it are kept.
        ops: the kernels or their torch twins.
    """

    capturable = True

    def __init__(self, predictor: Predictor | PackedPredictor, threshold: float, ops: Ops) -> None:
        device = predictor.w2.device
        super().__init__(predictor.units, device)
        self.predictor = predictor
        self.threshold = threshold
        self._ops = ops
        self._tickets = torch.zeros(1, dtype=torch.int32, device=device)
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return self.predictor.nbytes

    def choose(self, z: torch.Tensor, cache: DejaVuCache) -> None:
        """From the predictor's hidden layer [B, r], on the current stream."""
        self._ops.predict_select(
            z,
            self.predictor.w2,
            self.predictor.b2,
            self.threshold,
            cache.live,
            *self.selection,
            kept_total=self.kept_total,
            tickets=self._tickets,
            scale=self.predictor.w2_scale,
        )
        if self._done is not None:
            self._done.record()

    def join(self) -> Selection:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return self.selection

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return self.predictor.logits(x).float() > self.threshold


class Listeners:
    """The selectors that take their input at one place of a block.

    On a GPU the predictors run on a stream of their own, beside the block, from `begin` until each is joined. Their
    first layers are one product: the weights become views of one tensor. Those in 4 bits have a product each.

    Args:
        selectors: those that listen.
        ops: the kernels or their torch twins.
        stream: for the predictors; None runs them in line.
    """

    def __init__(
        self, selectors: Sequence[Selector] = (), ops: Ops | None = None, stream: "torch.cuda.Stream | None" = None
    ) -> None:
        self.selectors = list(selectors)
        self._predicted = [s for s in selectors if isinstance(s, PredictorSelector)]
        self._packed = [s for s in self._predicted if isinstance(s.predictor, PackedPredictor)]
        self._joined = [s for s in self._predicted if s not in self._packed]
        self._others = [s for s in selectors if not isinstance(s, PredictorSelector)]
        self._ops = ops
        self._stream = stream
        self._input: torch.Tensor | None = None
        self._all_of_packed = [Selection.all_of(s.predictor.rank, s.predictor.w2.device) for s in self._packed]
        if self._joined:
            nets = [s.predictor for s in self._joined]
            self._w1, self._b1 = joined([net.w1 for net in nets]), joined([net.b1 for net in nets])
            self._ranks = [net.rank for net in nets]
            self._all = Selection.all_of(sum(self._ranks), self._w1.device)

    def begin(self, x: torch.Tensor, cache: DejaVuCache) -> None:
        """Start every selector on the tap `x` [B, D]."""
        for selector in self._others:
            if selects(selector, cache):
                selector.begin(x, cache)
        if not any(selects(selector, cache) for selector in self._predicted):
            return
        if self._stream is None:
            self._predict(x, cache)
            return
        self._input = x  # for a step, so that the allocator does not hand its memory to the main stream too early
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._predict(x, cache)

    def _predict(self, x: torch.Tensor, cache: DejaVuCache) -> None:
        for selector, (idx, count, _) in zip(self._packed, self._all_of_packed, strict=True):
            if selects(selector, cache):
                net = selector.predictor
                product = packed_ops_for(x.device).gather_up_proj
                selector.choose(product(x, net.w1, net.b1, idx, count, relu=True), cache)
        if not any(selects(selector, cache) for selector in self._joined):
            return
        idx, count, _ = self._all
        z = self._ops.gather_up_proj(x, self._w1, self._b1, idx, count, relu=True)
        for selector, part in zip(self._joined, z.split(self._ranks, dim=1), strict=True):
            if selects(selector, cache):
                selector.choose(part, cache)


def joined(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The tensors one after the other in one, of which the parameters become views: no second copy."""
    whole = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
