"""Per-layer densities for a mean density: how a total is spread over the layers.

A budget is {"default": density, "means": [M], "rows": [M][L]}, plain numbers that go to JSON as they are: at mean
density means[i] over layers 1 and up, layer l has density rows[i][l]. means ascends and ends in 1.0. Layer 0 is apart:
its input says little of what comes, so it has a density of its own, which the mean leaves out.
"""

import bisect
import itertools
from collections.abc import Sequence

import torch

MEAN_DENSITIES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
_STEPS = 100


def row_at(budget: dict, mean: float) -> list[float]:
    """Densities [L] at a mean density in (0, 1], interpolated between the rows."""
    means, rows = budget["means"], budget["rows"]
    right = bisect.bisect_left(means, mean)
    if right == 0:
        # Below the table: shrink its first row, but leave layer 0 its own.
        return [rows[0][0], *(density * mean / means[0] for density in rows[0][1:])]
    share = (mean - means[right - 1]) / (means[right] - means[right - 1])
    # In this form exact at both ends: 1.0 must stay 1.0.
    return [low * (1 - share) + high * share for low, high in zip(rows[right - 1], rows[right], strict=True)]


def check_budget(unit: str, budget: dict | None, num_layers: int) -> None:
    """Raise ValueError unless budgets[unit] is a budget of that many layers, as the module docstring says."""
    if not isinstance(budget, dict) or {"default", "means", "rows"} - budget.keys():
        raise ValueError(f'budgets[{unit!r}] must have "default", "means" and "rows", got {budget!r}')
    means, rows = budget["means"], budget["rows"]
    if not means or means[-1] != 1.0 or means[0] <= 0 or any(b <= a for a, b in itertools.pairwise(means)):
        raise ValueError(f"budgets[{unit!r}]: means must ascend from above 0 to 1.0, got {means}")
    if len(rows) != len(means) or any(len(row) != num_layers for row in rows):
        raise ValueError(f"budgets[{unit!r}]: expected {len(means)} rows of {num_layers} densities")
    wrong = [d for d in (budget["default"], *itertools.chain(*rows)) if not 0 < d <= 1]
    if wrong:
        raise ValueError(f"budgets[{unit!r}]: densities must lie in (0, 1], got {wrong[:5]}")


def dense_budget(num_layers: int) -> dict:
    """Of a unit without predictors."""
    return {"default": 1.0, "means": [1.0], "rows": [[1.0] * num_layers]}


def allocate_budget(
    densities: Sequence[float], errors: list[list[float]], first_layer_density: float, max_error: float
) -> dict:
    """Spread mean densities over the layers so that their summed error is least.

    densities            [Q] ascending, the last is 1.0
    errors               [L-1][Q] at these densities, of the layers after the first
    first_layer_density  of layer 0, in every row but that of mean density 1.0
    max_error            the default density is the least mean density whose mean error is at most this
    Returns one entry of `PredictorSet.budgets`. Error curves are replaced by their lower convex hulls; then giving each
    hundredth of a layer to where it lowers the error most is optimal for every mean at once.
    """
    if not errors:
        rows = [[first_layer_density if mean < 1 else 1.0] for mean in MEAN_DENSITIES]
        return {"default": 1.0, "means": list(MEAN_DENSITIES), "rows": rows}
    hulls = torch.stack([_convex(densities, curve) for curve in errors])  # [L-1, _STEPS], from one step on
    gains = hulls[:, :-1] - hulls[:, 1:]
    order = gains.flatten().argsort(descending=True, stable=True) // gains.shape[1]  # layers, best step first
    rows, default = [], 1.0
    for mean in reversed(MEAN_DENSITIES):
        # Every layer has one step to begin with, so that none is left without any unit.
        steps = 1 + order[: round((mean * _STEPS - 1) * len(errors))].bincount(minlength=len(errors))
        rows.insert(0, [first_layer_density if mean < 1 else 1.0, *(steps / _STEPS).tolist()])
        if hulls.gather(1, steps[:, None] - 1).mean() <= max_error:
            default = mean
    return {"default": default, "means": list(MEAN_DENSITIES), "rows": [[round(d, 4) for d in row] for row in rows]}


def _convex(densities: Sequence[float], curve: list[float]) -> torch.Tensor:
    """Lower convex hull of the points (densities, curve), at densities 1/_STEPS, 2/_STEPS ... 1."""
    hull = []
    for point in zip(densities, curve, strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    values, segment = [], 0
    for step in range(1, _STEPS + 1):
        density = step / _STEPS
        while segment < len(hull) - 2 and density > hull[segment + 1][0]:
            segment += 1
        start = hull[segment]
        values.append(start[1] + _slope(start, hull[segment + 1]) * (density - start[0]))
    return torch.tensor(values, dtype=torch.float64)


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
