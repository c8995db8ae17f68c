"""What contextual sparsity rests on, layer by layer, in a dense pass over text.

The observations of Deja Vu (Liu et al. 2023, arXiv:2310.17157): that most units idle (figure 3), that the residual
stream changes slowly (figure 5), that a batch needs little more than a token does (figure 8), and what the predictors
find of it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm

from dejavu_ds.baselines import TopUnits, head_score
from dejavu_ds.block import PerToken, SparseBlock
from dejavu_ds.engine import DejaVuEngine
from dejavu_ds.kernels.dense import linear

IDLE_HEAD = 0.25
"""A head idles for a token when it adds less than this share of what its layer's heads add on average."""


@dataclass(frozen=True)
class Observations:
    """Means over `tokens` tokens of a dense pass; lists have one entry a layer.

    idle_neurons      share of neurons that ReLU sets to zero
    idle_heads        share of heads whose contribution, its norm after out_proj, is under IDLE_HEAD of the mean
    cosine            between the residual stream before and after the block
    norms             {"attention" | "mlp": {"x": norm of the stream before the unit, "f": norm of what it adds}}
    neuron_recall     share of the active neurons that the attached selectors keep; None where all are kept
    head_recall       likewise of the heads that add most, as many as the density asked for
    active_union      {batch size: share of neurons active for any of so many tokens}
    kept_union        {batch size: share of neurons that the selectors keep for any of them}
    """

    tokens: int
    idle_neurons: list[float]
    idle_heads: list[float]
    cosine: list[float]
    norms: dict[str, dict[str, list[float]]]
    neuron_recall: list[float | None]
    head_recall: list[float | None]
    active_union: dict[int, list[float]]
    kept_union: dict[int, list[float]]


class _Sums:
    """Sums over tokens and ranks, by name and layer."""

    def __init__(self, engine: DejaVuEngine) -> None:
        self._engine = engine
        self._values: dict[str, torch.Tensor] = defaultdict(
            lambda: torch.zeros(len(engine.blocks), dtype=torch.float64, device=engine.device)
        )

    def add(self, name: str, layer: int, value: torch.Tensor | float, shared: bool = False) -> None:
        """`shared`: every rank has the same value, to count once."""
        self._values[name][layer] += value / self._engine.tp.size if shared else value

    def reduce(self) -> dict[str, torch.Tensor]:
        """{name: [L]}, in the same order on every rank."""
        return {name: self._engine.tp.all_reduce(value).cpu() for name, value in sorted(self._values.items())}


@torch.no_grad()
def observe(
    engine: DejaVuEngine,
    windows: torch.Tensor,
    head_densities: Sequence[float],
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    seed: int = 0,
    progress: bool = False,
) -> Observations:
    """Watch a dense pass over windows [n, S] of token ids; the attached selectors are asked, and not obeyed.

    Args:
        head_densities: [L], asked of the head selectors, for `head_recall`.
        batch_sizes: a batch is so many tokens drawn from all over a window.
        seed: of that draw.

    Raises:
        ValueError: a batch size above the tokens of a window; a selector that is no predictor's.
    """
    if max(batch_sizes) > windows.shape[1]:
        raise ValueError(f"a batch of {max(batch_sizes)} tokens needs windows of as many, got {windows.shape[1]}")
    if any(s is not None and s.of_outputs for block in engine.blocks for s in (block.attention.selector,)):
        raise ValueError("an oracle of heads is attached, which chooses inside the unit: attach predictors or nothing")
    tops = [TopUnits(engine, "heads", layer, density) for layer, density in enumerate(head_densities)]
    sums, generator = _Sums(engine), torch.Generator().manual_seed(seed)
    for ids in tqdm(windows.split(1), disable=not progress, desc="observing"):
        ids = ids.to(engine.device)
        order = torch.randperm(ids.shape[1], generator=generator).to(engine.device)
        hidden = engine.policy.embed(engine.module, ids, torch.arange(ids.shape[1], device=engine.device)[None])
        keep = PerToken()
        for layer, block in enumerate(engine.blocks):
            before = hidden
            hidden = _attention(block, hidden, keep, tops[layer], sums)
            hidden = _mlp(block, hidden, keep, order, batch_sizes, sums)
            sums.add("cosine", layer, F.cosine_similarity(before.float(), hidden.float(), dim=-1).sum(), shared=True)
    return _observations(sums.reduce(), windows.numel(), windows.shape[1], batch_sizes)


def _attention(block: SparseBlock, hidden: torch.Tensor, keep: PerToken, top: TopUnits, sums: _Sums) -> torch.Tensor:
    attention, layer = block.attention, block.layer_idx
    x = block.unit_input(block.attention_norm, hidden)
    keep.tap(block.at_attention.selectors, x)
    kept = keep.of(attention.selector)
    outputs = []

    def see(o: torch.Tensor) -> torch.Tensor:
        outputs.append(o)
        return torch.ones_like(o[..., 0])

    y = attention.attend(*attention.project(x), None, see)
    scores = head_score(attention, "contribution")(outputs[0])  # [1, S, H]
    sums.add("heads", layer, scores[0, 0].numel())
    sums.add("idle heads", layer, (scores < IDLE_HEAD * top.mean(scores)).sum())
    needed = top(scores)
    # Zero and not nothing where all are kept: the ranks sum up the same names.
    sums.add("needed heads", layer, 0 if kept is None else needed.sum())
    sums.add("found heads", layer, 0 if kept is None else (needed & kept).sum())
    _norms("attention", layer, hidden, y, sums)
    return block.added(block.attention_norm, hidden, y)


def _mlp(
    block: SparseBlock,
    hidden: torch.Tensor,
    keep: PerToken,
    order: torch.Tensor,
    batch_sizes: Sequence[int],
    sums: _Sums,
) -> torch.Tensor:
    mlp, layer = block.mlp, block.layer_idx
    x = block.unit_input(block.mlp_norm, hidden)
    keep.tap(block.at_mlp.selectors, x)
    kept = keep.of(mlp.selector)
    active = linear(x, mlp.fc1, mlp.b1) > 0
    sums.add("neurons", layer, mlp.neurons)
    sums.add("idle neurons", layer, (~active).sum())
    sums.add("active neurons", layer, 0 if kept is None else active.sum())
    sums.add("found neurons", layer, 0 if kept is None else (active & kept).sum())
    for size in batch_sizes:
        sums.add(f"active union {size}", layer, _union(active[0, order], size))
        sums.add(f"kept union {size}", layer, mlp.neurons if kept is None else _union(kept[0, order], size))
    y = mlp.prefill(x)
    _norms("mlp", layer, hidden, y, sums)
    return block.added(block.mlp_norm, hidden, y)


def _union(sets: torch.Tensor, size: int) -> torch.Tensor:
    """Mean count of units in the unions of `size` tokens' sets, [S, N] bool; an incomplete batch is left out."""
    batches = len(sets) // size
    return sets[: batches * size].unflatten(0, (batches, size)).any(1).sum() / batches


def _norms(unit: str, layer: int, x: torch.Tensor, y: torch.Tensor, sums: _Sums) -> None:
    sums.add(f"{unit} x", layer, x.float().norm(dim=-1).sum(), shared=True)
    sums.add(f"{unit} f", layer, y.float().norm(dim=-1).sum(), shared=True)


def _observations(sums: dict[str, torch.Tensor], tokens: int, length: int, batch_sizes: Sequence[int]) -> Observations:
    """`length`: tokens of a window; the units of a layer were counted once a window."""

    def recall(found: str, all_: str) -> list[float | None]:
        return [f / a if a else None for f, a in zip(sums[found].tolist(), sums[all_].tolist(), strict=True)]

    return Observations(
        tokens=tokens,
        idle_neurons=(sums["idle neurons"] / (sums["neurons"] * length)).tolist(),
        idle_heads=(sums["idle heads"] / (sums["heads"] * length)).tolist(),
        cosine=(sums["cosine"] / tokens).tolist(),
        norms={
            unit: {name: (sums[f"{unit} {name}"] / tokens).tolist() for name in ("x", "f")}
            for unit in ("attention", "mlp")
        },
        neuron_recall=recall("found neurons", "active neurons"),
        head_recall=recall("found heads", "needed heads"),
        active_union={n: (sums[f"active union {n}"] / sums["neurons"]).tolist() for n in batch_sizes},
        kept_union={n: (sums[f"kept union {n}"] / sums["neurons"]).tolist() for n in batch_sizes},
    )
