"""Predictors with random weights, which keep just as many units as asked for.

A random net's logits say nothing of what a token needs, but reading it costs what reading a trained one costs. Its
thresholds are quantiles of what it gives in the very state that is timed: same prompt, same tokens, with the sparse
step's own hidden states.
"""

from collections.abc import Callable

import torch

from dejavu_ds import DejaVuEngine, PredictorSet, SparsityConfig
from dejavu_ds.bench.shapes import Shape
from dejavu_ds.predictor import Predictor
from dejavu_ds.ranks import ranks_within
from dejavu_ds.selection import Selector
from dejavu_ds.taps import UNITS, tap_of

# What the bundled predictors take of their model's decoder layers, and the widest that pays on a GPU at 30B.
MAX_PARAMETERS = 0.06
MAX_RANK = 256
# Spread of the heads' biases, by which the same heads are kept for most tokens. Of the kept ones then about as many
# were left out for the token before as with trained predictors on text: one in ten. Without it one in three was.
HEAD_SPREAD = 2.4
_CLOSE = 0.004
_PASSES = 8
_DAMPING = 0.7


def default_ranks(shape: Shape) -> dict[str, int]:
    """{"mlp": r, "heads": r}: 6 % of the layers' parameters, 256 at most."""
    units = {"mlp": shape.ffn, "heads": shape.heads}
    needs = {unit: [1.0] for unit in units}
    ranks = ranks_within(MAX_PARAMETERS, shape.block_parameters, shape.hidden, units, needs)
    return {unit: min(MAX_RANK, rank) for unit, (rank,) in ranks.items()}


def union_density(density: float, batch: int) -> float:
    """Share of units that `batch` independent sets of that density cover together."""
    return 1 - (1 - density) ** batch


def random_predictors(
    shape: Shape, ranks: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PredictorSet:
    """A set for every layer, not calibrated; a unit that has no entry in `ranks` gets none."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, std: float) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, std, generator=generator)

    def net(n: int, rank: int, spread: float) -> Predictor:
        w1, b1 = normal(rank, shape.hidden, std=shape.hidden**-0.5), torch.zeros(rank, dtype=dtype, device=device)
        return Predictor(w1, b1, normal(n, rank, std=rank**-0.5), normal(n, std=spread))

    units, spreads = {"mlp": shape.ffn, "heads": shape.heads}, {"mlp": 0.0, "heads": HEAD_SPREAD}
    sets = {
        unit: [net(units[unit], ranks[unit], spreads[unit]) if unit in ranks else None for _ in range(shape.layers)]
        for unit in UNITS
    }
    dense = {"default": 1.0, "means": [1.0], "rows": [[1.0] * shape.layers]}
    return PredictorSet(
        lookahead="half", fingerprint={}, budgets=dict.fromkeys(UNITS, dense), metadata={"random": True}, **sets
    )


def attach_calibrated(
    engine: DejaVuEngine, predictors: PredictorSet, densities: dict[str, float], run: Callable[[], object]
) -> None:
    """Attach a random set to the engine so that its steps keep these densities, all layers alike.

    Args:
        densities: {"mlp": d, "heads": d}, of the whole batch together, below 1 for each unit that has predictors.
        run: decodes, from the prompt, the tokens that will be timed, and leaves only these in the engine's statistics;
            called a few times.
    """
    recorders = _recorders(engine, predictors, densities)
    engine.attach({key: (recorder, tap_of(*key, "half")) for key, recorder in recorders.items()}, SparsityConfig())
    run()
    for (unit, layer), recorder in recorders.items():
        predictors.of(unit)[layer].calibrate(torch.cat(recorder.logits))
    rows = {unit: [densities[unit]] * predictors.num_layers for unit in UNITS}
    best, least = None, float("inf")
    for _ in range(_PASSES):
        _attach(engine, predictors, densities, rows)
        run()
        report = engine.stats.report()
        realised = {"mlp": report.mlp_by_layer, "heads": report.heads_by_layer}
        error = max(abs(sum(realised[unit]) / len(rows[unit]) / densities[unit] - 1) for unit in UNITS)
        if error < least:
            best, least = rows, error
        if error < _CLOSE:
            break
        rows = {unit: _corrected(rows[unit], realised[unit], densities[unit]) for unit in UNITS}
    if best is not rows:
        _attach(engine, predictors, densities, best)


class _Recorder(Selector):
    """Keeps exactly the share asked for at every step and remembers the logits it chose by."""

    def __init__(self, predictor: Predictor, start: int, stop: int, density: float) -> None:
        super().__init__(stop - start, predictor.w2.device)
        self._predictor = predictor
        self._local = slice(start, stop)
        self._kept = max(1, round(density * predictor.units))
        self.logits: list[torch.Tensor] = []

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """[B, D] -> [B, N of this rank]: every row the set of the whole batch, all ranks alike."""
        union = self._predictor.logits(x).float().flatten(0, -2).amax(0)
        self.logits.append(union)
        chosen = torch.zeros_like(union, dtype=torch.bool)
        chosen[union.topk(self._kept).indices] = True
        return chosen[self._local].expand(*x.shape[:-1], -1)


def _recorders(engine, predictors: PredictorSet, densities: dict[str, float]) -> dict[tuple[str, int], _Recorder]:
    recorders = {}
    for unit in UNITS:
        for layer, predictor in enumerate(predictors.of(unit)):
            start, stop = engine.local_units(unit, layer)
            if predictor is not None and stop > start:
                recorders[unit, layer] = _Recorder(predictor, start, stop, densities[unit])
    return recorders


def _attach(engine, predictors: PredictorSet, densities: dict[str, float], rows: dict[str, list[float]]) -> None:
    """Attach with these thresholds; the set's budget says what each layer asks for to give the mean wanted."""
    for unit in UNITS:
        mean, whole = densities[unit], [1.0] * predictors.num_layers
        table = {mean: rows[unit], 1.0: whole} if mean < 1 else {1.0: whole}
        predictors.budgets[unit] = {"default": mean, "means": list(table), "rows": list(table.values())}
    sparsity = SparsityConfig(densities["mlp"], densities["heads"])
    engine.attach(engine.predictor_selectors(predictors, sparsity), sparsity)


def _corrected(asked: list[float], realised: list[float], density: float) -> list[float]:
    """What to ask of each layer next; damped, since few heads move in large steps and would swing to and fro."""
    if density >= 1:
        return asked
    factors = [min(2.0, max(0.5, density / max(got, 1e-9))) ** _DAMPING for got in realised]
    return [min(0.999, max(1e-4, ask * factor)) for ask, factor in zip(asked, factors, strict=True)]
