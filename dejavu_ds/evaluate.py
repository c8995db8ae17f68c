"""What sparsity costs in perplexity, measured through the very path that generates."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from dejavu_ds.block import PerToken

if TYPE_CHECKING:
    from dejavu_ds.engine import DejaVuEngine

EVALUATION_MODES = ("dense", "masked", "decode")


@dataclass(frozen=True)
class Perplexity:
    """Perplexity over `tokens` predicted tokens, with the standard error of the mean loss carried over.

    Densities are realised means over all layers, dense ones included.
    """

    value: float
    stderr: float
    tokens: int
    mlp_density: float
    head_density: float


@torch.no_grad()
def perplexity(
    engine: "DejaVuEngine", windows: torch.Tensor, mode: str, batch_size: int = 8, progress: bool = False
) -> Perplexity:
    """Perplexity of the engine's model on windows of text; in each, all tokens but the first are predicted.

    Args:
        windows: [n, S] int64 token ids, n >= 1, S >= 2 (3 for "decode", whose first prediction is a dense prefill's),
            up to the model's positions.
        mode: "dense": every head and neuron. "masked": every position uses its own selection, K/V of all heads: the
            setting in which the paper measures accuracy. "decode": one token after the other, teacher-forced, through
            the decode step with its kernels, caches and missing K/V; one window at a time, since a batch would share
            its sets.
        batch_size: windows at once, for dense and masked.

    Raises:
        ValueError: an unknown mode or windows of another shape.
    """
    if mode not in EVALUATION_MODES:
        raise ValueError(f"mode must be one of {', '.join(EVALUATION_MODES)}, got {mode!r}")
    least = 3 if mode == "decode" else 2
    if windows.dim() != 2 or windows.shape[0] < 1 or windows.shape[1] < least:
        raise ValueError(
            f"{mode}: windows must be [n, S], n at least 1 and S at least {least}, got {list(windows.shape)}"
        )
    engine.stats.reset()
    per_token = PerToken() if mode == "masked" else None
    parts = windows.split(1 if mode == "decode" else batch_size)
    losses = [
        _losses(engine, ids.to(engine.device), mode, per_token) for ids in tqdm(parts, disable=not progress, desc=mode)
    ]
    loss = torch.cat(losses).double()
    value = math.exp(loss.mean().item())
    stderr = value * (loss.std() / len(loss) ** 0.5).item()
    return Perplexity(value, stderr, len(loss), *_densities(engine, mode, per_token))


def _losses(engine: "DejaVuEngine", ids: torch.Tensor, mode: str, per_token: PerToken | None) -> torch.Tensor:
    """[B, S] -> [B * (S - 1)] negative log-likelihoods."""
    if mode != "decode":
        logits = engine(input_ids=ids, use_cache=False, per_token=per_token).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    cache = engine.new_cache(1, ids.shape[1])
    steps = [engine(input_ids=ids[:, :1], past_key_values=cache).logits[:, -1]]
    steps += [engine.decode_one_token(ids[:, t], cache) for t in range(1, ids.shape[1] - 1)]
    return F.cross_entropy(torch.cat(steps).float(), ids[0, 1:], reduction="none")


def _densities(engine: "DejaVuEngine", mode: str, per_token: PerToken | None) -> tuple[float, float]:
    """Realised (MLP, heads) over all layers and ranks."""
    if mode == "dense":
        return 1.0, 1.0
    if mode == "decode":
        report = engine.stats.report()
        return report.mlp_density, report.head_density

    def kept_and_all(unit: nn.Module, size: int) -> tuple[float, float]:
        selector = unit.selector
        kept = size if selector is None else per_token.kept[selector] / per_token.tokens[selector]
        return kept, size

    counts = torch.tensor(
        [[*kept_and_all(b.mlp, b.mlp.neurons), *kept_and_all(b.attention, b.attention.heads)] for b in engine.blocks],
        dtype=torch.float64,
        device=engine.device,
    )
    neurons, all_neurons, heads, all_heads = engine.tp.all_reduce(counts.sum(0)).tolist()
    return neurons / all_neurons, heads / all_heads
