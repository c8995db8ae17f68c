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

    Densities are as realised; the means are over all layers, dense ones included.
    """

    value: float
    stderr: float
    tokens: int
    mlp_by_layer: list[float]
    heads_by_layer: list[float]

    @property
    def mlp_density(self) -> float:
        return sum(self.mlp_by_layer) / len(self.mlp_by_layer)

    @property
    def head_density(self) -> float:
        return sum(self.heads_by_layer) / len(self.heads_by_layer)


class Scorer:
    """Logits of given text in one mode, and the densities realised since it was made.

    Args:
        mode: "dense": every head and neuron. "masked": every position uses its own selection, K/V of all heads: the
            setting in which the paper measures accuracy. "decode": one token after the other, teacher-forced, through
            the decode step with its kernels, caches and missing K/V, from the first token on; one sequence at a time,
            since a batch would share its sets.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, engine: "DejaVuEngine", mode: str) -> None:
        if mode not in EVALUATION_MODES:
            raise ValueError(f"mode must be one of {', '.join(EVALUATION_MODES)}, got {mode!r}")
        self.mode = mode
        self._engine = engine
        self._per_token = PerToken() if mode == "masked" else None
        engine.stats.reset()

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Sequences without padding, [B, S] with S from 1 to the model's positions -> [B, S, V]."""
        engine, ids = self._engine, ids.to(self._engine.device)
        if self.mode != "decode":
            return engine(input_ids=ids, use_cache=False, per_token=self._per_token).logits
        return torch.cat([self._decode(sequence) for sequence in ids.split(1)])

    def _decode(self, ids: torch.Tensor) -> torch.Tensor:
        cache = self._engine.runner.spare_cache(1, ids.shape[1])
        steps = [self._engine.decode_one_token(token, cache) for token in ids.unbind(1)]
        self._engine.runner.keep_spare(cache)
        return torch.stack(steps, dim=1)

    def densities(self) -> tuple[float, float]:
        """Realised (MLP, heads) over all layers and ranks; collective."""
        mlp, heads = self.densities_by_layer()
        return sum(mlp) / len(mlp), sum(heads) / len(heads)

    def densities_by_layer(self) -> tuple[list[float], list[float]]:
        """Likewise, layer by layer."""
        engine = self._engine
        report = engine.stats.report()
        if self.mode == "dense" or (self.mode == "decode" and not report.steps):
            return [1.0] * len(engine.blocks), [1.0] * len(engine.blocks)
        if self.mode == "decode":
            return report.mlp_by_layer, report.heads_by_layer
        counts = torch.tensor(
            [
                [*self._counts(b.mlp, b.mlp.neurons), *self._counts(b.attention, b.attention.heads)]
                for b in engine.blocks
            ],
            dtype=torch.float64,
            device=engine.device,
        )
        neurons, all_neurons, heads, all_heads = engine.tp.all_reduce(counts).unbind(-1)
        return (neurons / all_neurons).tolist(), (heads / all_heads).tolist()

    def _counts(self, unit: nn.Module, size: int) -> tuple[float, int]:
        """Mean units kept and all of them, on this rank."""
        selector, seen = unit.selector, self._per_token
        if selector is None or selector not in seen.tokens:
            return size, size
        return seen.kept[selector] / seen.tokens[selector], size


@torch.no_grad()
def perplexity(
    engine: "DejaVuEngine", windows: torch.Tensor, mode: str, batch_size: int = 8, progress: bool = False
) -> Perplexity:
    """Perplexity of the engine's model on windows of text; in each, all tokens but the first are predicted.

    Args:
        windows: [n, S] int64 token ids, n >= 1, S >= 2, up to one more than the model's positions.
        mode: as `Scorer` says.
        batch_size: windows at once, for dense and masked.

    Raises:
        ValueError: an unknown mode or windows of another shape.
    """
    scorer = Scorer(engine, mode)
    if windows.dim() != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(f"{mode}: windows must be [n, S], n at least 1 and S at least 2, got {list(windows.shape)}")
    parts = windows.split(1 if mode == "decode" else batch_size)
    losses = [_losses(scorer, ids) for ids in tqdm(parts, disable=not progress, desc=mode)]
    loss = torch.cat(losses).double()
    value = math.exp(loss.mean().item())
    stderr = value * (loss.std() / len(loss) ** 0.5).item()
    return Perplexity(value, stderr, len(loss), *scorer.densities_by_layer())


def _losses(scorer: Scorer, ids: torch.Tensor) -> torch.Tensor:
    """[B, S] -> [B * (S - 1)] negative log-likelihoods."""
    logits = scorer.logits(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten().to(logits.device), reduction="none")
