"""From trained nets and their curves to a predictor set."""

from dataclasses import asdict

import torch
import transformers

from dejavu_ds.budget import allocate_budget, dense_budget
from dejavu_ds.calibrate import CURVE_DENSITIES
from dejavu_ds.predictor import Predictor, PredictorSet
from dejavu_ds.sharded import ModelFacts
from dejavu_ds.taps import UNITS
from dejavu_ds.train_config import TrainConfig


def assemble(
    facts: ModelFacts,
    config: TrainConfig,
    trained: dict[tuple[str, int], Predictor],
    curves: dict[tuple[str, int], dict],
    tokens: dict,
) -> PredictorSet:
    """The set of the predictors `trained`, {(unit, layer): predictor}, with budgets from their curves.

    tokens  {"training": number, "calibration": number, "data": name}, for the metadata
    """
    num_layers = facts.num_layers
    predictors, budgets, rounded = {}, {}, {}
    for unit in UNITS:
        if unit not in config.trained_units:
            predictors[unit], rounded[unit] = [None] * num_layers, [None] * num_layers
            budgets[unit] = dense_budget(num_layers)
            continue
        first = _first_layer_density(unit, trained, curves, config)
        kept = {n: trained[unit, n] for n in range(num_layers) if (unit, n) in trained and (n > 0 or first < 1)}
        predictors[unit] = [kept.get(n) for n in range(num_layers)]
        rounded[unit] = [_rounded(curves.get((unit, n))) for n in range(num_layers)]
        errors = [curves[unit, n]["error"] for n in range(1, num_layers)]
        budgets[unit] = allocate_budget(CURVE_DENSITIES, errors, first, config.max_error)
    metadata = {
        "criterion": config.criterion,
        "config": asdict(config),
        "tokens": tokens,
        "layers": rounded,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    return PredictorSet(
        lookahead=config.lookahead,
        fingerprint=facts.fingerprint,
        mlp=predictors["mlp"],
        heads=predictors["heads"],
        budgets=budgets,
        metadata=metadata,
    )


def _first_layer_density(
    unit: str, trained: dict[tuple[str, int], Predictor], curves: dict[tuple[str, int], dict], config: TrainConfig
) -> float:
    """Of layer 0; for "auto" the least on its curve with an error that is allowed, 1 if its predictor costs more than
    what it leaves out."""
    if config.first_layer_density != "auto":
        return config.first_layer_density
    curve = curves[unit, 0]
    allowed = zip(curve["density"], curve["error"], strict=True)
    density = min(density for density, error in allowed if error <= config.max_error or density == 1.0)
    predictor = trained[unit, 0]
    # Weights of a unit: a row of fc1 and one of fc2, or head_dim rows of q, k, v and the output projection.
    hidden_size = predictor.w1.shape[1]
    weights = 2 * hidden_size * predictor.units if unit == "mlp" else 4 * hidden_size**2
    cost = sum(p.numel() for p in predictor.parameters())
    return density if (1 - density) * weights > cost else 1.0


def _rounded(curve: dict | None) -> dict | None:
    """Five digits are plenty in a JSON file."""
    if curve is None:
        return None
    return {
        name: [float(f"{v:.5g}") for v in value] if isinstance(value, list) else float(f"{value:.5g}")
        for name, value in curve.items()
    }
