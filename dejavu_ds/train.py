"""Fit a predictor set to a dense model, streaming: the text is run, learnt from and forgotten, round by round.

Deja Vu (Liu et al. 2023, arXiv:2310.17157, sections 4.1 and 4.2). What is learnt: `dejavu_ds.criteria`; how one net
learns it: `dejavu_ds.unit_trainer`; what can be set: `dejavu_ds.train_config`.
"""

import hashlib
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from dejavu_ds.assemble import assemble
from dejavu_ds.collect import Collector
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.injection_policies import policy_for
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.ranks import ranks_within
from dejavu_ds.resume import CHECKPOINT_FILE, check_same_arguments, read_checkpoint, write_checkpoint
from dejavu_ds.taps import UNITS
from dejavu_ds.text import cut_windows, split_documents, token_ids
from dejavu_ds.train_config import TrainConfig
from dejavu_ds.unit_trainer import UnitTrainer

# Fewer make a poor table of quantiles.
_CALIBRATION_TOKENS = 8192

Trainers = dict[tuple[str, int], UnitTrainer]


def train_predictors(
    model: nn.Module,
    tokenizer,
    documents: list[str],
    config: TrainConfig | None = None,
    data_name: str = "",
    folder: str | os.PathLike | None = None,
    save_minutes: float = 5.0,
) -> PredictorSet:
    """Train, calibrate and return the predictors of a plain HF model (in eval mode for the while): fp32, on the CPU.

    documents     texts; the last `validation_share` of them are never trained on: they decide which state of a net is
                  best and calibrate it. If these are short, training text joins them.
    data_name     goes into the metadata.
    folder        keeps a checkpoint, written every `save_minutes` at most; one that is there is gone on with, to the
                  same end as without a stop. It is removed with `remove_checkpoint`, once the set is saved.
    The same seed, machine and number of threads give the same predictors, bit for bit.
    Raises ValueError for a model that has no policy, too little text, or a checkpoint of other arguments.
    """
    config = config or TrainConfig()
    positions = model.config.max_position_embeddings
    if config.context > positions:
        raise ValueError(f"context {config.context} is more than the {positions} positions of the model")
    windows, validation = split_windows(documents, tokenizer, config)
    generator = torch.Generator().manual_seed(config.seed)
    was_training = model.training
    model.eval()
    try:
        capacity = config.buffer_tokens // config.context * config.context
        collector = Collector(model, capacity, config.gradient_units)
        trainers = _trainers(model, config, collector.collect(validation), len(windows))
        run = _Run(collector, windows, validation, trainers, config, generator)
        if folder is not None:
            arguments = {**asdict(config), "model": fingerprint(model), "text": _digest(windows, validation)}
            arguments |= {"data": data_name, "device": model.device.type}
            run.keep(Path(folder) / CHECKPOINT_FILE, arguments, save_minutes)
        run.train()
        records = collector.collect(validation)
        curves = {key: trainer.finish(records) for key, trainer in trainers.items()}
    finally:
        model.train(was_training)
    tokens = {"training": windows.numel(), "calibration": validation.numel(), "data": data_name}
    predictors = {key: trainer.predictor for key, trainer in trainers.items()}
    return assemble(model, config, predictors, curves, tokens)


def remove_checkpoint(folder: str | os.PathLike) -> None:
    """Forget the state of a training that is finished and saved."""
    (Path(folder) / CHECKPOINT_FILE).unlink(missing_ok=True)


class _Run:
    """The rounds of all epochs, with the place in them, so that it can be left and found again."""

    def __init__(
        self,
        collector: Collector,
        windows: torch.Tensor,
        validation: torch.Tensor,
        trainers: Trainers,
        config: TrainConfig,
        generator: torch.Generator,
    ):
        self._collector, self._windows, self._validation = collector, windows, validation
        self._trainers, self._config, self._generator = trainers, config, generator
        self._per_round = config.buffer_tokens // config.context
        self._rounds = math.ceil(len(windows) / self._per_round)
        self._done = 0  # rounds
        self._order = torch.empty(0, dtype=torch.int64)  # of the windows, in this epoch
        self._path: Path | None = None
        self._arguments: dict = {}
        self._save_every = self._saved_at = 0.0

    def keep(self, path: Path, arguments: dict, minutes: float) -> None:
        """Write checkpoints to `path`; go on with the one that is there. ValueError if its arguments differ."""
        self._path, self._arguments, self._save_every = path, arguments, 60 * minutes
        checkpoint = read_checkpoint(path)
        if checkpoint is None:
            return
        content, tensors = checkpoint
        check_same_arguments(path, content["arguments"], arguments)
        self._done, self._order = content["rounds"], tensors["order"]
        self._generator.set_state(tensors["generator"])
        for (unit, layer), trainer in self._trainers.items():
            prefix = f"{unit}.{layer}."
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            trainer.restore(content["trainers"][prefix], own)

    def train(self) -> None:
        """Learn until all predictors have stopped or all epochs are over."""
        self._saved_at = time.monotonic()
        total = self._config.epochs * self._windows.numel()
        done = self._done // self._rounds * self._windows.numel()
        done += self._done % self._rounds * self._per_round * self._config.context
        # The unit of the bar gives tokens/s; the losses are the layers' in order, "-" for one that has stopped.
        with tqdm(total=total, initial=done, unit="tok", unit_scale=True, desc="training") as bar:
            while self._done < self._config.epochs * self._rounds:
                if all(trainer.stopped for trainer in self._trainers.values()):
                    break
                losses = self._round(bar)
                bar.set_postfix({unit: " ".join(row) for unit, row in losses.items()})
                self._save_if_due()

    def _round(self, bar: tqdm) -> dict[str, list[str]]:
        position = self._done % self._rounds
        if position == 0:
            self._order = torch.randperm(len(self._windows), generator=self._generator)
        chosen = self._order[position * self._per_round :][: self._per_round]
        records = self._collector.collect(self._windows[chosen])
        losses: dict[str, list[str]] = {unit: [] for unit in UNITS}
        for (unit, _layer), trainer in self._trainers.items():
            loss = trainer.learn(records)
            losses[unit].append("-" if math.isnan(loss) else f"{loss:.3f}")
        self._done += 1
        bar.update(chosen.numel() * self._config.context)
        if position == self._rounds - 1:
            records = self._collector.collect(self._validation)
            for trainer in self._trainers.values():
                trainer.check(records)
        return losses

    def _save_if_due(self) -> None:
        if self._path is None or time.monotonic() - self._saved_at < self._save_every:
            return
        content = {"arguments": self._arguments, "rounds": self._done, "trainers": {}}
        tensors = {"order": self._order, "generator": self._generator.get_state()}
        for (unit, layer), trainer in self._trainers.items():
            content["trainers"][f"{unit}.{layer}."] = trainer.numbers()
            tensors |= {f"{unit}.{layer}.{name}": tensor for name, tensor in trainer.tensors().items()}
        write_checkpoint(self._path, content, tensors)
        self._saved_at = time.monotonic()


def split_windows(documents: list[str], tokenizer, config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows [n, context] of token ids: those that training reads, and those that it validates on."""
    training, validation = (token_ids(part, tokenizer) for part in split_documents(documents, config.validation_share))
    windows = cut_windows(training, config.context)
    missing = max(0, min(_CALIBRATION_TOKENS, config.buffer_tokens) - len(validation))
    validation = torch.cat([validation, training[:missing]])[: config.buffer_tokens]
    return windows, cut_windows(validation, config.context)


def _digest(*windows: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for part in windows:
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def _trainers(model: nn.Module, config: TrainConfig, records: list, num_windows: int) -> Trainers:
    """One for each predictor to train; `records` say what each layer needs."""
    per_round = config.buffer_tokens // config.context
    rounds = [min(per_round, num_windows - start) for start in range(0, num_windows, per_round)]
    steps = config.epochs * sum(math.ceil(n * config.context / config.batch_tokens) for n in rounds)
    layers = range(0 if config.first_layer_density != 1 else 1, len(records))
    if not layers:
        return {}
    needs = _needs(records, layers, config.mlp_threshold)
    ranks = _ranks(model, config, needs)
    mean_need = sum(needs) / len(needs)
    trainers = {}
    for place, layer in enumerate(layers):
        targets = {
            "mlp": min(1.0, config.mlp_target_density * needs[place] / mean_need),
            "heads": config.head_target_density,
        }
        for unit in UNITS:
            arguments = (unit, layer, config, ranks[unit][place], targets[unit], steps)
            trainers[unit, layer] = UnitTrainer(model, *arguments)
    return trainers


def _needs(records: list, layers: range, threshold: float) -> list[float]:
    """Share of active neurons in each layer. Layer 0 counts like the mean of the others: most of its are active, but
    what it adds would not pay for half of the budget."""

    def active(activation: torch.Tensor) -> float:
        return sum((part > threshold).sum().item() for part in activation.split(1024)) / activation.numel()

    needs = [max(active(records[layer].activation), 1e-4) for layer in layers]
    if layers[0] == 0 and len(needs) > 1:
        needs[0] = min(needs[0], sum(needs[1:]) / (len(needs) - 1))
    return needs


def _ranks(model: nn.Module, config: TrainConfig, needs: list[float]) -> dict[str, list[int]]:
    if config.rank is not None:
        return {"mlp": [config.rank] * len(needs), "heads": [config.head_rank] * len(needs)}
    policy = policy_for(model.config)
    layers = policy.layers(model)
    ffn, hidden_size = policy.parts(layers[0]).fc1.weight.shape
    units = {"mlp": ffn, "heads": hidden_size // policy.head_dim(model.config)}
    block_parameters = sum(p.numel() for p in layers.parameters())
    return ranks_within(
        config.max_parameters, block_parameters, hidden_size, units, {"mlp": needs, "heads": [1.0] * len(needs)}
    )
