"""Selections to measure a predictor's against: an oracle's, one set for all inputs, and chance.

Deja Vu (Liu et al. 2023, arXiv:2310.17157) argues by these: that small sets suffice (oracle), that they depend on the
input (static), and that it matters which (random). All keep the same number of units in a layer, the k = density * N
of a predictor set's budget, and go through the same blocks, kernels and caches as the predictor's.

A unit's score is what it adds for a token, from the unit's own true input:
    neuron   relu(fc1 x + b1) * norm of its fc2 column: the norm of its contribution to the residual stream
    head     by criterion: "norm", of its output o [head_dim]; "contribution", the norm of o times its rows of out_proj

    oracle   a token's k units of the highest scores; "true" in the state that earlier layers, sparse too, have left
    static   the k units of the highest mean score on calibration text
    random   k units drawn for every token afresh, seeded
"""

from collections.abc import Callable

import torch
from torch import nn
from tqdm import tqdm

from dejavu_ds.block import PerToken
from dejavu_ds.config import SparsityConfig
from dejavu_ds.criteria import gram_matrices, head_scores
from dejavu_ds.engine import DejaVuEngine
from dejavu_ds.kernels.dense import as_tensor, linear
from dejavu_ds.selection import Selector
from dejavu_ds.taps import UNITS, tap_of

SELECTIONS = ("predictor", "oracle", "static", "random")
HEAD_CRITERIA = ("norm", "contribution")

Scores = dict[tuple[str, int], torch.Tensor]
"""{(unit, layer): [N] fp32 mean scores of this rank's units}."""


class OracleSelector(Selector):
    """A token's units of the highest true scores.

    Args:
        unit: the attention or MLP module whose units are chosen.
        top: picks from scores.
        criterion: of heads.
    """

    def __init__(self, unit: nn.Module, top: "TopUnits", criterion: str) -> None:
        super().__init__(top.stop - top.start, top.device)
        self.of_outputs = hasattr(unit, "heads")
        self._score = head_score(unit, criterion) if self.of_outputs else _neuron_score(unit)
        self._top = top

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """From the MLP's input [..., D], or from the heads' outputs [..., H, head_dim]."""
        return self._top(self._score(x))


class ScoreRecorder(OracleSelector):
    """Keeps everything and sums up the scores; `mean` is of the tokens seen."""

    def __init__(self, unit: nn.Module, top: "TopUnits", criterion: str) -> None:
        super().__init__(unit, top, criterion)
        self._sum = torch.zeros(self.size, dtype=torch.float64, device=top.device)
        self._tokens = 0

    @property
    def mean(self) -> torch.Tensor:
        """[N] fp32"""
        return (self._sum / self._tokens).float()

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        scores = self._score(x)
        self._sum += scores.flatten(0, -2).double().sum(0)
        self._tokens += scores.shape[:-1].numel()
        return torch.ones_like(scores, dtype=torch.bool)


class StaticSelector(Selector):
    """The same units for every token.

    Args:
        scores: [N] of this rank's units.
        top: picks from them.
    """

    def __init__(self, scores: torch.Tensor, top: "TopUnits") -> None:
        super().__init__(len(scores), scores.device)
        self._mask = top(scores)

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return self._mask.expand(*x.shape[:-1], -1)


class RandomSelector(Selector):
    """Units drawn without replacement, for every token afresh; every rank draws the same."""

    def __init__(self, top: "TopUnits", seed: int) -> None:
        super().__init__(top.stop - top.start, top.device)
        self._top = top
        self._generator = torch.Generator(top.device).manual_seed(seed)

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self._top.total)
        return self._top.of_all(torch.rand(shape, generator=self._generator, device=self._top.device))


class TopUnits:
    """Marks the units with the k highest scores of a layer, whatever the ranks they are on.

    Collective: every rank calls it alike.

    Raises:
        ValueError: a rank without units, which could not take part.
    """

    def __init__(self, engine: DejaVuEngine, unit: str, layer: int, density: float) -> None:
        self.start, self.stop = engine.local_units(unit, layer)
        self.device = engine.device
        self._tp = engine.tp
        sizes = torch.tensor([self.stop - self.start, self.stop == self.start], device=self.device)
        self.total, empty = self._tp.all_reduce(sizes).tolist()
        if empty:
            raise ValueError(
                f"{empty} of {self._tp.size} ranks hold no {unit} of layer {layer}: compare selections on fewer ranks"
            )
        self.k = max(1, round(density * self.total))

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """[..., N] of this rank's units -> [..., N] bool."""
        if self._tp.size > 1:
            whole = scores.new_zeros(*scores.shape[:-1], self.total)
            whole[..., self.start : self.stop] = scores
            scores = self._tp.all_reduce(whole)
        return self.of_all(scores)

    def mean(self, scores: torch.Tensor) -> torch.Tensor:
        """[..., N] of this rank's units -> [..., 1], over those of all ranks."""
        return self._tp.all_reduce(scores.sum(-1, keepdim=True)) / self.total

    def of_all(self, scores: torch.Tensor) -> torch.Tensor:
        """Likewise from the scores of every rank's units."""
        best = scores.topk(self.k, dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)[..., self.start : self.stop]


def layer_densities(engine: DejaVuEngine, sparsity: SparsityConfig) -> dict[str, list[float]]:
    """{unit: [L] densities}: by the budget of the engine's predictor set; without one, layer 0 dense and the rest even.

    Without predictors a density that was not asked for is 1.
    """
    predictors, layers = engine.predictors, len(engine.blocks)
    if predictors is None:
        return {unit: [1.0] + [sparsity.density(unit, 1.0)] * (layers - 1) for unit in UNITS}
    asked = {unit: sparsity.density(unit, predictors.default_density(unit)) for unit in UNITS}
    return {unit: predictors.densities(unit, asked[unit]) for unit in UNITS}


def use_selection(
    engine: DejaVuEngine,
    name: str,
    sparsity: SparsityConfig | None = None,
    *,
    densities: dict[str, list[float]] | None = None,
    static: Scores | None = None,
    criterion: str = "norm",
    seed: int = 0,
) -> None:
    """Let another selection choose in all of the engine's layers, at other densities if asked.

    Args:
        name: one of SELECTIONS.
        sparsity: densities as in `init_inference`; None takes the engine's own.
        densities: {"mlp": [L], "heads": [L]} in place of `layer_densities`, ignored by "predictor"; 1.0 is dense.
        static: what `mean_scores` returned, for "static".
        criterion: one of HEAD_CRITERIA, by which "oracle" scores heads.
        seed: of "random".

    Raises:
        ValueError: an unknown name or criterion, "predictor" without predictors, "static" without scores.
    """
    if name not in SELECTIONS:
        raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {name!r}")
    sparsity = sparsity or engine.sparsity or SparsityConfig()
    if name == "predictor":
        if engine.predictors is None:
            raise ValueError("selection 'predictor' needs predictors: pass some to init_inference")
        engine.attach(engine.predictor_selectors(engine.predictors, sparsity), sparsity)
        return
    if name == "static" and static is None:
        raise ValueError("selection 'static' needs mean scores of calibration text: pass those of mean_scores")
    selectors = {}
    densities = densities or layer_densities(engine, sparsity)
    for number, unit in enumerate(UNITS):
        for layer, density in enumerate(densities[unit]):
            if density >= 1:
                continue
            top = TopUnits(engine, unit, layer, density)
            if name == "oracle":
                selector = OracleSelector(_module(engine, unit, layer), top, criterion)
            elif name == "static":
                selector = StaticSelector(static[unit, layer], top)
            else:
                selector = RandomSelector(top, (seed * len(engine.blocks) + layer) * len(UNITS) + number)
            selectors[unit, layer] = selector, tap_of(unit, layer, "none")
    engine.attach(selectors, sparsity)


@torch.no_grad()
def mean_scores(
    engine: DejaVuEngine, windows: torch.Tensor, criterion: str = "norm", batch_size: int = 8, progress: bool = False
) -> Scores:
    """Mean scores of every unit over calibration text, for the static selection; leaves the engine dense.

    Args:
        windows: [n, S] int64 token ids, up to the model's positions.
        criterion: one of HEAD_CRITERIA.
    """
    recorders = {
        (unit, layer): ScoreRecorder(_module(engine, unit, layer), TopUnits(engine, unit, layer, 1.0), criterion)
        for unit in UNITS
        for layer in range(len(engine.blocks))
    }
    sparsity = engine.sparsity or SparsityConfig()
    engine.attach({key: (recorder, tap_of(*key, "none")) for key, recorder in recorders.items()}, sparsity)
    for ids in tqdm(windows.split(batch_size), disable=not progress, desc="calibration"):
        engine(input_ids=ids.to(engine.device), use_cache=False, logits_to_keep=1, per_token=PerToken())
    engine.attach({}, sparsity)
    return {key: recorder.mean for key, recorder in recorders.items()}


def _module(engine: DejaVuEngine, unit: str, layer: int) -> nn.Module:
    block = engine.blocks[layer]
    return block.attention if unit == "heads" else block.mlp


def _neuron_score(mlp: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """[..., D] -> [..., F] fp32"""
    norms = as_tensor(mlp.fc2).float().norm(dim=-1)
    return lambda x: torch.relu(linear(x, mlp.fc1, mlp.b1)).float() * norms


def head_score(attention: nn.Module, criterion: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What heads score by their outputs, a function [..., H, head_dim] -> [..., H] fp32.

    Raises ValueError for an unknown criterion.
    """
    if criterion not in HEAD_CRITERIA:
        raise ValueError(f"criterion of heads must be one of {', '.join(HEAD_CRITERIA)}, got {criterion!r}")
    gram = gram_matrices(as_tensor(attention.out).T, attention.head_dim) if criterion == "contribution" else None
    return lambda o: head_scores(criterion, o.float(), gram=gram)
