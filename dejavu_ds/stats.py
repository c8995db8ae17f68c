"""What the decode steps really kept and read."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dejavu_ds.kernels.packed_weight import PackedWeight
from dejavu_ds.selection import Selector
from dejavu_ds.taps import UNITS

if TYPE_CHECKING:
    from dejavu_ds.engine import DejaVuEngine


@dataclass
class StepReport:
    """Means over the decode steps since the last reset, over all layers and ranks; None where there was no step.

    steps                decode steps; one step makes one token for each sequence of the batch
    mlp_density          neurons kept / all neurons
    head_density         heads kept / all heads
    mlp_by_layer, heads_by_layer  the same layer by layer
    weight_bytes_read    bytes of weights a step reads, predictors and head included, summed over the ranks
    dense_weight_bytes   what a dense step reads, likewise
    share_read           the former over the latter
    """

    steps: int
    mlp_density: float | None
    head_density: float | None
    weight_bytes_read: int | None
    dense_weight_bytes: int
    share_read: float | None
    mlp_by_layer: list[float] | None
    heads_by_layer: list[float] | None

    def as_dict(self) -> dict:
        """Plain numbers and lists, for JSON."""
        return asdict(self)


class StepStats:
    """Counts on the device what each step keeps; `report` brings the sums to the host.

    Bytes follow from the counts: a kept neuron is a row of fc1 and one of fc2 (rows that fc2 skips because their
    activation is exactly zero are counted as read), a kept head its rows of q, k, v and the output projection, a
    head with a long run to recover its rows of k and v once more. In masked mode these are the bytes that the gather
    would read.
    """

    def __init__(self, engine: "DejaVuEngine") -> None:
        self._engine = engine
        self.steps = 0
        self.dense_steps = dict.fromkeys(UNITS, 0)
        """Of these, the ones in which a unit ran dense though it has selectors."""

    def count_step(self, dense_units: Collection[str] = ()) -> None:
        """One more decode step, and what ran dense in it."""
        self.steps += 1
        for unit in dense_units:
            self.dense_steps[unit] += 1

    def reset(self) -> None:
        """Forget all steps so far."""
        self.steps, self.dense_steps = 0, dict.fromkeys(UNITS, 0)
        for counter in self.counters():
            counter.zero_()

    def counters(self) -> list[torch.Tensor]:
        """The tensors in which the steps count."""
        counters = []
        for block in self._engine.blocks:
            selectors = (block.attention.selector, block.mlp.selector)
            counters.append(block.attention.recovered_total)
            counters += [selector.kept_total for selector in selectors if selector is not None]
        return counters

    def report(self) -> StepReport:
        """The means; collective under tensor parallelism, so every rank must call it."""
        engine, steps = self._engine, max(self.steps, 1)
        shares = {unit: dense / steps for unit, dense in self.dense_steps.items()}
        rows = [_layer_counts(block, steps, shares) for block in engine.blocks]
        counts = torch.tensor(rows, dtype=torch.float64, device=engine.device)
        kept_heads, heads, kept_neurons, neurons, read, dense = engine.tp.all_reduce(counts).T.tolist()
        fixed = torch.tensor([float(_bytes(engine.module.lm_head))], dtype=torch.float64, device=engine.device)
        fixed = engine.tp.all_reduce(fixed).item()
        read_total, dense_total = sum(read) + fixed, sum(dense) + fixed
        measured = {
            "mlp_density": sum(kept_neurons) / sum(neurons),
            "head_density": sum(kept_heads) / sum(heads),
            "weight_bytes_read": round(read_total),
            "share_read": read_total / dense_total,
            "mlp_by_layer": [kept / all_ for kept, all_ in zip(kept_neurons, neurons, strict=True)],
            "heads_by_layer": [kept / all_ for kept, all_ in zip(kept_heads, heads, strict=True)],
        }
        if self.steps == 0:
            measured = dict.fromkeys(measured)
        return StepReport(steps=self.steps, dense_weight_bytes=round(dense_total), **measured)


def _layer_counts(block: nn.Module, steps: int, dense_shares: dict[str, float]) -> tuple[float, ...]:
    """Heads and neurons kept, bytes read and the dense ones, of one layer, rank and step.

    dense_shares  of the steps, in which a unit with selectors ran dense
    """
    attention, mlp = block.attention, block.mlp
    biases = _size(attention.out_bias) + _size(mlp.b2)
    head_bytes = (_bytes(attention) - _size(attention.out_bias)) / attention.heads
    neuron_bytes = (_bytes(mlp) - _size(mlp.b2)) / max(mlp.neurons, 1)
    heads = _kept(attention.selector, attention.heads, steps, dense_shares["heads"])
    neurons = _kept(mlp.selector, mlp.neurons, steps, dense_shares["mlp"])
    # Of a head that was not selected (q, k, v, out: head_dim rows each, biases aside) recovery reads k and v.
    recovered = attention.recovered_total.item() / steps * head_bytes / 2
    fixed = biases + _bytes(block.attention_norm) + _bytes(block.mlp_norm)
    chosen = (("heads", attention.selector), ("mlp", mlp.selector))
    predictors = sum(s.nbytes * (1 - dense_shares[unit]) for unit, s in chosen if s is not None)
    read = fixed + predictors + heads * head_bytes + recovered + neurons * neuron_bytes
    dense = fixed + attention.heads * head_bytes + mlp.neurons * neuron_bytes
    return heads, attention.heads, neurons, mlp.neurons, read, dense


def _kept(selector: Selector | None, size: int, steps: int, dense_share: float) -> float:
    return size if selector is None else selector.kept_total.item() / steps + dense_share * size


def _bytes(module: nn.Module) -> int:
    packed = sum(m.nbytes for m in module.modules() if isinstance(m, PackedWeight))
    return packed + sum(_size(p) for p in module.parameters())


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
