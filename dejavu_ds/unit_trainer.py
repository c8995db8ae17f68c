"""Training of one predictor: the neurons or the heads of one layer."""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from dejavu_ds.calibrate import UnitData, calibrate_quantiles, measure_curve
from dejavu_ds.collect import LayerRecord, tap_input
from dejavu_ds.criteria import gram_matrices, head_scores, largest, log_sizes
from dejavu_ds.predictor import Predictor
from dejavu_ds.taps import tap_of
from dejavu_ds.train_config import TrainConfig

_TENSORS = ("w1", "b1", "w2", "b2")
_WARM_UP = 0.3
# Sizes of heads are learnt down to e^-9 of the typical square: below that, what they are makes no difference.
_LEAST_LOG_SIZE = -9.0


def one_cycle(peak: float, step: int, steps: int) -> float:
    """Learning rate of step 0 ... steps - 1: half a cosine up from peak / 25, then half a one down to nothing.

    After Smith and Topin 2018, arXiv:1708.07120. A function of the step alone, so there is no state to restore.
    """
    turn = _WARM_UP * steps
    if step < turn:
        low, position = peak / 25, step / turn
    else:
        low, position = 0.0, 1 - (step - turn) / (steps - turn)
    return low + (peak - low) * (1 - math.cos(math.pi * position)) / 2


class UnitTrainer:
    """Trains the predictor of one unit kind in one layer.

    weight   [D, N * group] of fc2 or out_proj
    group    columns of it that a unit has: 1 or head_dim
    rank     r of the predictor
    target   density at which the share of the unit's output that is kept decides which state is best
    steps    optimiser steps of the whole training

    It has random numbers of its own, so a predictor comes out the same whatever else is trained beside it.
    """

    def __init__(
        self,
        unit: str,
        layer: int,
        weight: torch.Tensor,
        group: int,
        config: TrainConfig,
        rank: int,
        target: float,
        steps: int,
    ):
        self.unit, self.layer, self._weight, self._group, self._config = unit, layer, weight, group, config
        self._tap, self._target, self._steps = tap_of(unit, layer, config.lookahead), target, steps
        hidden_size, columns = self._weight.shape
        seed = hashlib.sha256(f"{config.seed} {unit} {layer}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        predictor = Predictor.random(hidden_size, rank, columns // self._group, self._generator)
        self.predictor = predictor.to(self._weight.device).requires_grad_(True)
        self._kept_heads = min(max(1, round(config.head_label_density * predictor.units)), predictor.units)
        self._column_norm = self._weight.float().norm(dim=0)
        self._gram = None
        if unit == "heads" and config.criterion == "contribution":
            self._gram = gram_matrices(self._weight, self._group)
        self._learns_sizes = unit == "heads" and config.head_loss == "size"
        # Taken from the first round: the weight of a positive, or the mean log size.
        self._scale: float | None = None
        self._optimizer = torch.optim.AdamW(
            self.predictor.parameters(), lr=config.learning_rate, weight_decay=0.01, fused=True
        )
        # Before the first step the state is empty; a state to restore has to have somewhere to go.
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._named()}
        for name, p in self._named():
            first, second = self._moments[name]
            self._optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device), "exp_avg": first, "exp_avg_sq": second,
            }  # fmt: skip
        self.step = 0
        self.best = {name: p.detach().clone() for name, p in self._named()}
        self.best_kept, self.stale, self.stopped = -math.inf, 0, False

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, getattr(self.predictor, name)) for name in _TENSORS]

    def label(self, outputs: torch.Tensor, sensitivity: torch.Tensor | None) -> torch.Tensor:
        """Outputs [t, N * group] in fp32 -> the units needed, [t, N] bool; see `dejavu_ds.criteria`."""
        if self.unit == "mlp":
            return outputs > self._config.mlp_threshold
        outputs = outputs.unflatten(-1, (-1, self._group))
        return largest(head_scores(self._config.criterion, outputs, sensitivity, self._gram), self._kept_heads)

    def data(self, records: list[LayerRecord]) -> UnitData:
        """What this predictor reads and should say, on recorded text."""
        record = records[self.layer]
        outputs = record.activation if self.unit == "mlp" else record.head_outputs
        sensitivity = record.mlp_sensitivity if self.unit == "mlp" else record.head_sensitivity
        inputs = tap_input(records, self._tap)
        return UnitData(inputs, outputs, self._weight, record.residual, self._group, self.label, sensitivity)

    def learn(self, records: list[LayerRecord]) -> float:
        """One pass over a round of T tokens in random order; returns the mean loss, NaN once stopped."""
        if self.stopped:
            return math.nan
        data = self.data(records)
        if self._scale is None:
            self._scale = self._mean_log_size(data) if self._learns_sizes else self._scale_positives(data)
        order = torch.randperm(len(data.outputs), generator=self._generator)
        total = 0.0
        with torch.enable_grad():
            for rows in order.to(data.outputs.device).split(self._config.batch_tokens):
                self._optimizer.param_groups[0]["lr"] = one_cycle(self._config.learning_rate, self.step, self._steps)
                loss = self._loss(data, rows)
                self._optimizer.zero_grad()
                loss.backward()
                self._optimizer.step()
                self.step += 1
                total += loss.detach() * len(rows)
        return float(total) / len(order)

    def check(self, records: list[LayerRecord]) -> float:
        """Share of the unit's output kept at the target density on validation text; keeps the best state.

        Stops after `patience` checks in a row without a better one.
        """
        if self.stopped:
            return self.best_kept
        data = self.data(records)
        calibrate_quantiles(self.predictor, data.inputs, self._generator)
        kept = measure_curve(self.predictor, data, (self._target,))["kept"][0]
        self.stale = 0 if kept > self.best_kept else self.stale + 1
        if self.stale == 0:
            self.best_kept = kept
            self.best = {name: p.detach().clone() for name, p in self._named()}
        self.stopped = self.stale >= self._config.patience
        return kept

    def finish(self, records: list[LayerRecord]) -> dict:
        """Go back to the best state and calibrate it; returns its curve, see `dejavu_ds.calibrate`."""
        self.predictor.requires_grad_(False)
        for name, parameter in self._named():
            parameter.copy_(self.best[name])
        data = self.data(records)
        calibrate_quantiles(self.predictor, data.inputs, self._generator)
        return measure_curve(self.predictor, data)

    def numbers(self) -> dict:
        """All of the state that is no tensor, for JSON."""
        names = ("step", "best_kept", "stale", "stopped", "_scale")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the state, under names; those of weights and moments are the ones in use."""
        tensors = {"generator": self._generator.get_state()}
        for name, parameter in self._named():
            tensors[name], tensors[f"best.{name}"] = parameter.detach(), self.best[name]
            tensors[f"first.{name}"], tensors[f"second.{name}"] = self._moments[name]
        return tensors

    @torch.no_grad()
    def restore(self, numbers: dict, tensors: dict[str, torch.Tensor]) -> None:
        """Go on from the state that `numbers` and `tensors` gave."""
        for name, value in numbers.items():
            setattr(self, name, value)
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self._generator.set_state(tensors["generator"])
        for state in self._optimizer.state.values():
            state["step"].fill_(self.step)

    def _loss(self, data: UnitData, rows: torch.Tensor) -> torch.Tensor:
        """Binary cross-entropy in which positives and negatives have their say whatever their number; of sizes, the
        squared error."""
        logits = self.predictor.logits(data.inputs[rows.to(data.inputs.device)].to(self.predictor.w1))
        if self._learns_sizes:
            return F.mse_loss(logits, (self._log_sizes(data, rows) - self._scale).clamp(min=_LEAST_LOG_SIZE))
        outputs = data.outputs[rows].float()
        sensitivity = None if data.sensitivity is None else data.sensitivity[rows]
        label = self.label(outputs, sensitivity)
        weight = torch.where(label, self._worth(outputs, sensitivity) * self._scale, 1.0)
        return F.binary_cross_entropy_with_logits(logits, label.float(), weight=weight)

    def _log_sizes(self, data: UnitData, rows: torch.Tensor | slice) -> torch.Tensor:
        """Of the heads, [t, H]; see `dejavu_ds.criteria`."""
        outputs = data.outputs[rows].float().unflatten(-1, (-1, self._group))
        sensitivity = None if data.sensitivity is None else data.sensitivity[rows]
        scores = head_scores(self._config.criterion, outputs, sensitivity, self._gram)
        return log_sizes(self._config.criterion, scores, data.residual[rows])

    def _mean_log_size(self, data: UnitData) -> float:
        """Over a first round; logits then start around zero. Heads that did nothing at all are left out."""
        total = count = 0
        for start in range(0, len(data.outputs), 1024):
            sizes = self._log_sizes(data, slice(start, start + 1024)).double()
            finite = sizes[sizes.isfinite()]
            total, count = total + finite.sum().item(), count + len(finite)
        return total / max(count, 1)

    def _worth(self, outputs: torch.Tensor, sensitivity: torch.Tensor | None) -> torch.Tensor | float:
        """What a positive counts by, up to a factor: keeping the output counts, not recall."""
        if self.unit == "heads" or self._config.mlp_weight == "none":
            return 1.0
        return sensitivity.float() if self._config.mlp_weight == "plainact" else outputs * self._column_norm

    def _scale_positives(self, data: UnitData) -> float:
        """Gives the positives, on a first round, together the weight that all units have together.

        Measured on opt-7m, layers 3 and 5 at densities .12 to .32: a weight that leaves more say to the negatives, by
        the fourth root of the share of positives, has 2 to 13 % more error, by the square root 17 to 38 % on top.
        """
        if self.unit == "heads":
            return self.predictor.units / self._kept_heads
        worth = 0.0
        for start in range(0, len(data.outputs), 1024):
            rows = slice(start, start + 1024)
            outputs = data.outputs[rows].float()
            sensitivity = None if data.sensitivity is None else data.sensitivity[rows]
            worth += (self.label(outputs, sensitivity) * self._worth(outputs, sensitivity)).sum().item()
        return data.outputs.numel() / max(worth, 1e-12)
