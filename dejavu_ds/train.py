"""Fit a predictor set to a dense model, streaming: the text is run, learnt from and forgotten, round by round.

Deja Vu (Liu et al. 2023, arXiv:2310.17157, sections 4.1 and 4.2). Labels, per token:
    mlp    a neuron is positive iff its pre-activation is above zero. Positives count in the loss as much as they add
           to the residual stream (activation times the norm of the fc2 column): keeping the output counts, not recall.
    heads  a head is positive iff it is among the `head_label_density` share of largest output norm.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from tqdm import tqdm

from dejavu_ds.budget import allocate_budget
from dejavu_ds.calibrate import CURVE_DENSITIES, UnitData, calibrate_quantiles, measure_curve
from dejavu_ds.collect import Collector, LayerRecord, tap_input
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.injection_policies import policy_for
from dejavu_ds.predictor import Predictor, PredictorSet
from dejavu_ds.taps import LOOKAHEADS, UNITS, tap_of
from dejavu_ds.text import cut_windows, split_documents, token_ids

# Fewer make a poor table of quantiles.
_CALIBRATION_TOKENS = 8192


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Raises TypeError or ValueError for a value out of range.

    lookahead            where predictors take their input, see `dejavu_ds.taps`
    rank, head_rank      r of the MLP and head predictors; head_rank None: half of rank
    epochs               passes over the text; each runs the model again
    context              tokens in a window
    buffer_tokens        tokens in a round: bounds the memory, see `dejavu_ds.collect`
    batch_tokens         tokens in an optimiser step
    learning_rate        peak of the one-cycle schedule
    head_label_density   share of heads labelled as needed
    first_layer_density  of block 0, whose input says little of what comes; 1.0: dense, no predictor
    max_error            the default density is the least whose mean error per layer is at most this
    validation_share     of the documents, the last ones: never trained on
    """

    lookahead: str = "half"
    rank: int = 64
    head_rank: int | None = None
    epochs: int = 3
    seed: int = 0
    context: int = 256
    buffer_tokens: int = 16384
    batch_tokens: int = 1024
    learning_rate: float = 4e-3
    head_label_density: float = 0.5
    first_layer_density: float = 1.0
    max_error: float = 5e-4
    validation_share: float = 0.08

    def __post_init__(self):
        if self.lookahead not in LOOKAHEADS:
            raise ValueError(f"lookahead must be one of {LOOKAHEADS}, got {self.lookahead!r}")
        if self.head_rank is None:
            object.__setattr__(self, "head_rank", max(1, self.rank // 2))
        for name in ("rank", "head_rank", "epochs", "context", "buffer_tokens", "batch_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.buffer_tokens < self.context:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} must hold one window, context is {self.context}")
        for name, top in (("head_label_density", False), ("first_layer_density", True), ("validation_share", False)):
            value = getattr(self, name)
            if not (0 < value < 1 or (top and value == 1)):
                raise ValueError(f"{name} must lie in (0, 1{']' if top else ')'}, got {value}")
        for name in ("learning_rate", "max_error"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


def train_predictors(
    model: nn.Module, tokenizer, documents: list[str], config: TrainConfig | None = None, data_name: str = ""
) -> PredictorSet:
    """Train, calibrate and return the predictors of a plain HF model (in eval mode for the while): fp32, on the CPU.

    documents  texts; the last `validation_share` of them serve for calibration alone. If these are short, training
               text joins them.
    data_name  goes into the metadata.
    The same seed, machine and number of threads give the same predictors, bit for bit.
    Raises ValueError for a model that has no policy, or too little text.
    """
    config = config or TrainConfig()
    if config.context > model.config.max_position_embeddings:
        raise ValueError(
            f"context {config.context} is more than the {model.config.max_position_embeddings} positions of the model"
        )
    training, validation = (token_ids(part, tokenizer) for part in split_documents(documents, config.validation_share))
    windows = cut_windows(training, config.context)
    missing = max(0, min(_CALIBRATION_TOKENS, config.buffer_tokens) - len(validation))
    calibration = torch.cat([validation, training[:missing]])[: config.buffer_tokens]
    generator = torch.Generator().manual_seed(config.seed)
    was_training = model.training
    model.eval()
    try:
        collector = Collector(model, config.buffer_tokens // config.context * config.context)
        trainers = _trainers(model, config, len(windows), generator)
        _run_epochs(collector, windows, trainers, config, generator)
        records = collector.collect(cut_windows(calibration, config.context))
        curves = {key: trainer.finish(records, generator) for key, trainer in trainers.items()}
    finally:
        model.train(was_training)
    tokens = {"training": windows.numel(), "calibration": len(records[0]), "data": data_name}
    return _assemble(model, config, trainers, curves, tokens)


class UnitTrainer:
    """Trains the predictor of one unit kind in one layer."""

    def __init__(self, model: nn.Module, unit: str, layer: int, config: TrainConfig, steps: int, seed: torch.Generator):
        policy = policy_for(model.config)
        parts = policy.parts(policy.layers(model)[layer])
        self.unit, self.layer, self._tap = unit, layer, tap_of(unit, layer, config.lookahead)
        self._group = 1 if unit == "mlp" else policy.head_dim(model.config)
        self._weight = (parts.fc2 if unit == "mlp" else parts.out).weight.detach()
        hidden_size, columns = self._weight.shape
        rank = config.rank if unit == "mlp" else config.head_rank
        predictor = Predictor.random(hidden_size, rank, columns // self._group, seed)
        self.predictor = predictor.to(self._weight.device).requires_grad_(True)
        self._kept_heads = min(max(1, round(config.head_label_density * predictor.units)), predictor.units)
        self._column_norm = self._weight.float().norm(dim=0)
        self._positive_weight = None
        self._optimizer = torch.optim.AdamW(self.predictor.parameters(), lr=config.learning_rate, weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, config.learning_rate, total_steps=steps)

    def label(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [t, N * group] in fp32 -> the truly active units, [t, N] bool."""
        if self.unit == "mlp":
            return outputs > 0
        norms = outputs.unflatten(-1, (-1, self._group)).norm(dim=-1)
        top = norms.topk(self._kept_heads, dim=-1).indices
        return torch.zeros_like(norms, dtype=torch.bool).scatter_(-1, top, True)

    def learn(self, records: list[LayerRecord], order: torch.Tensor, batch_tokens: int) -> float:
        """One pass over a round of T tokens in `order` [T]; returns the mean loss."""
        data = self._data(records)
        if self.unit == "mlp" and self._positive_weight is None:
            self._positive_weight = self._weigh_positives(data.outputs)
        total = 0.0
        with torch.enable_grad():
            for rows in order.to(data.outputs.device).split(batch_tokens):
                loss = self._loss(data.inputs[rows.to(data.inputs.device)], data.outputs[rows].float())
                self._optimizer.zero_grad()
                loss.backward()
                self._optimizer.step()
                self._schedule.step()
                total += loss.detach() * len(rows)
        return float(total) / len(order)

    def finish(self, records: list[LayerRecord], generator: torch.Generator) -> dict:
        """Calibrate the predictor on held-out records; returns its curve, see `dejavu_ds.calibrate`."""
        data = self._data(records)
        self.predictor.requires_grad_(False)
        calibrate_quantiles(self.predictor, data.inputs, generator)
        return measure_curve(self.predictor, data)

    def _data(self, records: list[LayerRecord]) -> UnitData:
        record = records[self.layer]
        outputs = record.activation if self.unit == "mlp" else record.head_outputs
        inputs = tap_input(records, self._tap)
        return UnitData(inputs, outputs, self._weight, record.residual, self._group, self.label)

    def _loss(self, x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        label = self.label(outputs)
        weight = torch.where(label, outputs * self._positive_weight, 1.0) if self.unit == "mlp" else None
        logits = self.predictor.logits(x.to(self.predictor.w1))
        return F.binary_cross_entropy_with_logits(logits, label.float(), weight=weight)

    def _weigh_positives(self, activation: torch.Tensor) -> torch.Tensor:
        """[F]: an activation times this is the weight of its positive label.

        Proportional to the norm of the fc2 column. The mean over the positives is sqrt(1 / share of positives): on a
        log scale half way from leaving the few positives to the many negatives to giving both sides the same say.
        """
        active = sum((part > 0).sum() for part in activation.split(1024)).clamp(min=1)
        mass = sum((part.float() @ self._column_norm).sum() for part in activation.split(1024)).clamp(min=1e-12)
        share = active / activation.numel()
        return self._column_norm * (active / mass) / share.sqrt()


def _trainers(
    model: nn.Module, config: TrainConfig, num_windows: int, generator: torch.Generator
) -> dict[tuple[str, int], UnitTrainer]:
    per_round = config.buffer_tokens // config.context
    rounds = [min(per_round, num_windows - start) for start in range(0, num_windows, per_round)]
    steps = config.epochs * sum(math.ceil(n * config.context / config.batch_tokens) for n in rounds)
    num_layers = len(policy_for(model.config).layers(model))
    first = 0 if config.first_layer_density < 1 else 1
    return {
        (unit, layer): UnitTrainer(model, unit, layer, config, steps, generator)
        for layer in range(first, num_layers)
        for unit in UNITS
    }


def _run_epochs(
    collector: Collector,
    windows: torch.Tensor,
    trainers: dict[tuple[str, int], UnitTrainer],
    config: TrainConfig,
    generator: torch.Generator,
) -> None:
    per_round = config.buffer_tokens // config.context
    # The unit of the bar gives tokens/s; the losses are the layers' in order.
    with tqdm(total=config.epochs * windows.numel(), unit="tok", unit_scale=True, desc="training") as bar:
        for _ in range(config.epochs):
            for chosen in torch.randperm(len(windows), generator=generator).split(per_round):
                records = collector.collect(windows[chosen])
                losses = {unit: [] for unit in UNITS}
                for (unit, _layer), trainer in trainers.items():
                    order = torch.randperm(len(records[0]), generator=generator)
                    losses[unit].append(trainer.learn(records, order, config.batch_tokens))
                bar.set_postfix({unit: " ".join(f"{loss:.3f}" for loss in row) for unit, row in losses.items()})
                bar.update(chosen.numel() * config.context)


def _assemble(
    model: nn.Module,
    config: TrainConfig,
    trainers: dict[tuple[str, int], UnitTrainer],
    curves: dict[tuple[str, int], dict],
    tokens: dict,
) -> PredictorSet:
    layers = range(len(policy_for(model.config).layers(model)))
    predictors, budgets, rounded = {}, {}, {}
    for unit in UNITS:
        predictors[unit] = [trainers[unit, n].predictor.cpu() if (unit, n) in trainers else None for n in layers]
        rounded[unit] = [_rounded(curves.get((unit, n))) for n in layers]
        errors = [curves[unit, n]["error"] for n in layers[1:]]
        budgets[unit] = allocate_budget(CURVE_DENSITIES, errors, config.first_layer_density, config.max_error)
    return PredictorSet(
        lookahead=config.lookahead,
        fingerprint=fingerprint(model),
        mlp=predictors["mlp"],
        heads=predictors["heads"],
        budgets=budgets,
        metadata={
            "criterion": "binary cross-entropy; mlp: pre-activation > 0, weighted by activation times fc2 column norm; "
            "heads: largest output norms",
            "config": asdict(config),
            "tokens": tokens,
            "layers": rounded,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        },
    )


def _rounded(curve: dict | None) -> dict | None:
    """Five digits are plenty in a JSON file."""
    if curve is None:
        return None
    return {
        name: [float(f"{v:.5g}") for v in value] if isinstance(value, list) else float(f"{value:.5g}")
        for name, value in curve.items()
    }
