"""Densities that keep a promise: perplexity rises by at most so much, at the fewest bytes read.

Found on text that the predictors were trained on, confirmed on text that they were not; both in the masked setting of
`dejavu_ds.masked`. If the confirmation fails, the promise is sought again with less than was asked for.
"""

import bisect
from collections.abc import Callable

import torch
from torch import nn

from dejavu_ds.budget import MEAN_DENSITIES
from dejavu_ds.injection_policies import policy_for
from dejavu_ds.masked import masking, text_perplexity
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.taps import UNITS

_HEAD_MEANS = (1.0, 0.9, 0.75, 0.6, 0.5)
_TRIES = 4
_TIGHTER = 0.7


def keep_promise(
    model: nn.Module, predictors: PredictorSet, finding: torch.Tensor, confirming: torch.Tensor, increase: float
) -> dict:
    """Set the default densities of `predictors` to the cheapest that keep perplexity within 1 + `increase` of dense.

    finding, confirming  windows [n, S] of token ids
    increase             .01 allows 1 %
    Returns, and puts into the metadata as "promise": what was asked, the densities, and the increases that were
    measured. Dense, if nothing less keeps it. Raises ValueError for an increase that is not above 0.
    """
    if not increase > 0:
        raise ValueError(f"the perplexity increase must be above 0, got {increase}")
    parameters = [p for unit in UNITS for net in predictors.of(unit) if net is not None for p in net.parameters()]
    originals = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(model.device)
    try:
        rise_on_finding = _rises(model, predictors, finding)
        rise_on_confirming = _rises(model, predictors, confirming)
        allowed = increase
        for _ in range(_TRIES):
            found = cheapest(lambda d, a=allowed: rise_on_finding(d) <= a, bytes_model(model, predictors))
            densities = _effective(predictors, found)
            if rise_on_confirming(densities) <= increase:
                break
            allowed *= _TIGHTER
        else:
            densities = {"mlp": 1.0, "heads": 1.0}
    finally:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original
    for unit, density in densities.items():
        predictors.budgets[unit]["default"] = density
    promise = {"max_perplexity_increase": increase, "densities": densities}
    promise["found"] = round(rise_on_finding(densities), 6)
    promise["confirmed"] = round(rise_on_confirming(densities), 6)
    predictors.metadata["promise"] = promise
    return promise


def bytes_model(model: nn.Module, predictors: PredictorSet) -> Callable[[dict[str, float]], float]:
    """Weights of the blocks that a decode step reads at mean densities {"mlp": ..., "heads": ...}."""
    parts = policy_for(model.config).parts(policy_for(model.config).layers(model)[0])
    ffn, hidden_size = parts.fc1.weight.shape
    weights = {"mlp": 2 * ffn * hidden_size, "heads": 4 * hidden_size**2}

    def read(densities: dict[str, float]) -> float:
        total = 0.0
        for unit, mean in densities.items():
            for predictor, density in zip(predictors.of(unit), predictors.densities(unit, mean), strict=True):
                total += density * weights[unit]
                total += sum(p.numel() for p in predictor.parameters()) if density < 1 else 0
        return total

    return read


def cheapest(keeps: Callable[[dict[str, float]], bool], read: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """The mean densities of the table with the fewest bytes that keep the promise; dense if none does.

    For each mean density of heads, the least of neurons is found by bisection: more neurons do no harm.
    """
    best = {"mlp": 1.0, "heads": 1.0}
    for heads in _HEAD_MEANS:

        def kept(mean: float, heads: float = heads) -> bool:
            return keeps({"mlp": mean, "heads": heads})

        # With all neurons these heads already break it, and fewer heads will too.
        if heads < 1 and not kept(1.0):
            break
        place = bisect.bisect_left(MEAN_DENSITIES[:-1], True, key=kept)
        found = {"mlp": MEAN_DENSITIES[place], "heads": heads}
        if read(found) < read(best):
            best = found
    return best


def _effective(predictors: PredictorSet, densities: dict[str, float]) -> dict[str, float]:
    """A unit without predictors is dense, whatever is asked of it."""
    return {unit: density if any(predictors.of(unit)) else 1.0 for unit, density in densities.items()}


def _rises(model: nn.Module, predictors: PredictorSet, windows: torch.Tensor) -> Callable[[dict[str, float]], float]:
    """Relative rise of perplexity over dense; remembered, since a search comes by again."""
    dense = text_perplexity(model, windows)
    known = {(1.0, 1.0): 0.0}

    def rise(densities: dict[str, float]) -> float:
        densities = _effective(predictors, densities)
        key = densities["mlp"], densities["heads"]
        if key not in known:
            with masking(model, predictors, densities):
                known[key] = text_perplexity(model, windows) / dense - 1
        return known[key]

    return rise
