"""How good a trained net is, at any density: its thresholds and its error curve.

Terms, for one layer and one unit kind:
    threshold   a unit is kept iff its logit is strictly above it
    density     kept / all
    recall      share of the truly active units that are kept (for heads: of those labelled as needed)
    precision   share of the kept units that are truly active
    error       squared norm of what the dropped units would have added to the residual stream, over the squared norm
                of the stream after the block; mean over tokens
    kept        share of the unit's output that is kept: 1 - error / (error with every unit dropped)

Recall counts a neuron that adds nothing like one that adds much; the budgets (`dejavu_ds.budget`) therefore
go by the error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dejavu_ds.predictor import Predictor

# Fine where models of this kind are run, coarse where errors are near zero anyway.
CURVE_DENSITIES = (0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.18, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.75, 1.0)
# Quantiles of a million samples are within .0003 at density .1.
_QUANTILE_SAMPLES = 2**21
_CHUNK = 1024


@dataclass
class UnitData:
    """One layer's units on calibration text of T tokens, as tensors to be read in chunks.

    inputs    [T, D] at the predictor's tap
    outputs   [T, N * group] what the units pass on (activations, or head outputs with group = head_dim)
    weight    [D, N * group] that maps them into the residual stream (fc2, out_proj)
    residual  [T] squared norm of the stream after the block
    group     columns of `outputs` a unit has
    label     how to tell the active units: (outputs [t, N * group] fp32, sensitivity rows or None) -> [t, N] bool
    sensitivity  [T, N] |activation * gradient|, where recorded
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor
    group: int
    label: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    sensitivity: torch.Tensor | None = None


@torch.no_grad()
def calibrate_quantiles(predictor: Predictor, inputs: torch.Tensor, generator: torch.Generator) -> None:
    """Fill the predictor's table from random (token, unit) pairs of inputs [T, D]; from all if they are few."""
    share = _QUANTILE_SAMPLES / (len(inputs) * predictor.units)
    sampled = []
    for x in inputs.split(_CHUNK):
        logits = predictor.logits(x.to(predictor.w1)).flatten()
        if share < 1:
            index = torch.randint(len(logits), (int(share * len(logits)),), generator=generator)
            logits = logits[index.to(logits.device)]
        sampled.append(logits)
    predictor.calibrate(torch.cat(sampled))


@torch.no_grad()
def measure_curve(predictor: Predictor, data: UnitData, densities: Sequence[float] = CURVE_DENSITIES) -> dict:
    """{"active": share, "density" | "realised" | "error" | "kept" | "recall" | "precision": one value a density}.

    "realised" is the density that the threshold gives on this text.
    """
    thresholds = [predictor.threshold(density) for density in densities]
    totals = torch.zeros(len(thresholds), 3, dtype=torch.float64)  # error, kept, kept and active
    active_total, all_dropped = 0, 0.0
    weight = data.weight.float().T

    def error_of(outputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return ((outputs @ weight).square().sum(-1) / residual.clamp(min=1e-12)).sum()

    for start in range(0, len(data.inputs), _CHUNK):
        rows = slice(start, start + _CHUNK)
        logits = predictor.logits(data.inputs[rows].to(predictor.w1))
        outputs, residual = data.outputs[rows].float(), data.residual[rows]
        active = data.label(outputs, None if data.sensitivity is None else data.sensitivity[rows])
        active_total += active.sum().item()
        all_dropped += error_of(outputs, residual).item()
        for row, threshold in enumerate(thresholds):
            kept = logits > threshold
            error = error_of(outputs.masked_fill(kept.repeat_interleave(data.group, -1), 0.0), residual)
            totals[row] += torch.stack([error, kept.sum(), (kept & active).sum()]).double().cpu()
    tokens, pairs = len(data.inputs), len(data.inputs) * predictor.units
    error, kept, hits = totals.unbind(-1)
    return {
        "active": active_total / pairs,
        "density": list(densities),
        "realised": (kept / pairs).tolist(),
        "error": (error / tokens).tolist(),
        "kept": (1 - error / max(all_dropped, 1e-12)).tolist(),
        "recall": (hits / max(active_total, 1)).tolist(),
        "precision": (hits / kept.clamp(min=1)).tolist(),
    }
