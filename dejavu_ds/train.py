"""Fit a predictor set to a dense model, streaming: the text is run, learnt from and forgotten, round by round.

Deja Vu (Liu et al. 2023, arXiv:2310.17157, sections 4.1 and 4.2). What is learnt: `dejavu_ds.criteria`; how one net
learns it: `dejavu_ds.unit_trainer`; what can be set: `dejavu_ds.train_config`.
"""

import hashlib
import math
import os
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from dejavu_ds.assemble import assemble
from dejavu_ds.collect import Collector, LayerRecord
from dejavu_ds.injection_policies import policy_for
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.ranks import ranks_within
from dejavu_ds.resume import checkpoint_path
from dejavu_ds.rounds import Rounds, Trainers
from dejavu_ds.sharded import DenseModel, ModelFacts
from dejavu_ds.text import cut_windows, split_documents, token_ids
from dejavu_ds.train_config import TrainConfig
from dejavu_ds.unit_trainer import UnitTrainer

# Fewer make a poor table of quantiles.
_CALIBRATION_TOKENS = 8192


def train_predictors(
    model: nn.Module | DenseModel,
    tokenizer,
    documents: list[str],
    config: TrainConfig | None = None,
    data_name: str = "",
    folder: str | os.PathLike | None = None,
    save_minutes: float = 5.0,
) -> PredictorSet:
    """Train, calibrate and return the predictors of an HF model (in eval mode for the while): fp32, on the CPU.

    model         plain, or split by `DenseModel.split`; then all ranks call this, and all get the same set.
    documents     texts; the last `validation_share` of them are never trained on: they decide which state of a net is
                  best and calibrate it. If these are short, training text joins them.
    data_name     goes into the metadata.
    folder        keeps a checkpoint, written every `save_minutes` at most; one that is there is gone on with, to the
                  same end as without a stop. It is removed with `remove_checkpoint`, once the set is saved.
    The same seed, machine and number of threads and processes give the same predictors, bit for bit.
    Raises ValueError for a model that has no policy, too little text, or a checkpoint of other arguments.
    """
    config, dense = config or TrainConfig(), DenseModel.of(model)
    positions = dense.model.config.max_position_embeddings
    if config.context > positions:
        raise ValueError(f"context {config.context} is more than the {positions} positions of the model")
    windows, validation = split_windows(documents, tokenizer, config)
    was_training = dense.model.training
    dense.model.eval()
    try:
        capacity = config.buffer_tokens // config.context * config.context
        collector = Collector(dense, capacity, config.gradient_units, config.trained_units)
        trainers = _trainers(dense, config, collector.collect(validation), len(windows))
        rounds = Rounds(collector, windows, validation, trainers, config, dense.ranks)
        if folder is not None:
            arguments = {**asdict(config), "model": dense.facts.fingerprint, "text": _digest(windows, validation)}
            arguments |= {"data": data_name, "device": dense.model.device.type}
            rounds.keep(checkpoint_path(folder, dense.ranks.rank, dense.ranks.size), arguments, save_minutes)
        rounds.train()
        records = collector.collect(validation)
        own = {key: (trainer.finish(records), trainer.predictor.cpu()) for key, trainer in trainers.items()}
    finally:
        dense.model.train(was_training)
    tokens = {"training": windows.numel(), "calibration": validation.numel(), "data": data_name}
    finished = {key: value for part in dense.ranks.gathered(own) for key, value in part.items()}
    predictors = {key: predictor for key, (_, predictor) in finished.items()}
    return assemble(dense.facts, config, predictors, {key: curve for key, (curve, _) in finished.items()}, tokens)


def remove_checkpoint(folder: str | os.PathLike) -> None:
    """Forget the state of a training that is finished and saved, of all processes."""
    for path in Path(folder).glob("training*.safetensors*"):
        path.unlink()


def split_windows(documents: list[str], tokenizer, config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows [n, context] of token ids: those that training reads, and those that it validates on."""
    training, validation = (token_ids(part, tokenizer) for part in split_documents(documents, config.validation_share))
    windows = cut_windows(training, config.context)
    missing = max(0, min(_CALIBRATION_TOKENS, config.buffer_tokens) - len(validation))
    if missing:
        warnings.warn(
            f"the documents kept for validation hold only {len(validation)} tokens, so {min(missing, len(training))} "
            "of the training text are validated on too: what is said of validation is too good; give more documents",
            stacklevel=3,
        )
    validation = torch.cat([validation, training[:missing]])[: config.buffer_tokens]
    return windows, cut_windows(validation, config.context)


def _digest(*windows: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for part in windows:
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def _trainers(dense: DenseModel, config: TrainConfig, records: list[LayerRecord], num_windows: int) -> Trainers:
    """One for each predictor that this rank trains; `records` say what each layer needs."""
    per_round = config.buffer_tokens // config.context
    rounds = [min(per_round, num_windows - start) for start in range(0, num_windows, per_round)]
    steps = config.epochs * sum(math.ceil(n * config.context / config.batch_tokens) for n in rounds)
    facts, trainers = dense.facts, {}
    layers = range(0 if config.first_layer_density != 1 else 1, facts.num_layers)
    if not layers:
        return {}
    # Without neurons to learn, nothing depends on their needs.
    needs = [1.0] * len(layers)
    if "mlp" in config.trained_units:
        needs = _needs(dense, records, layers, config.mlp_threshold)
    widths = _widths(facts, config, needs)
    mean_need = sum(needs) / len(needs)
    for place, layer in enumerate(layers):
        target = min(1.0, config.mlp_target_density * needs[place] / mean_need)
        targets = {"mlp": target, "heads": config.head_target_density}
        for unit in config.trained_units:
            weight = _weight(dense, unit, layer)
            if weight is None:
                continue
            group = 1 if unit == "mlp" else facts.head_dim
            settings = (config, widths[unit][place], targets[unit], steps)
            trainers[unit, layer] = UnitTrainer(unit, layer, weight, group, *settings)
    return trainers


def _weight(dense: DenseModel, unit: str, layer: int) -> torch.Tensor | None:
    """[D, N * group] of fc2 or out_proj on the rank that trains this layer; all ranks call it."""
    policy = policy_for(dense.model.config)
    parts = policy.parts(policy.layers(dense.model)[layer])
    part = (parts.fc2 if unit == "mlp" else parts.out).weight.detach()
    columns = dense.facts.units["mlp"] if unit == "mlp" else dense.facts.hidden_size
    return dense.ranks.whole(part, columns, dense.ranks.owner(layer, dense.facts.num_layers))


def _needs(dense: DenseModel, records: list[LayerRecord], layers: range, threshold: float) -> list[float]:
    """Share of active neurons in each layer. Layer 0 counts at most like the mean of the others: most of its neurons
    are active, but what leaving some out saves would not pay for half of the parameters."""
    active = torch.zeros(len(layers), dtype=torch.float64)
    for place, layer in enumerate(layers):
        activation = records[layer].activation
        if activation is not None:
            positives = sum((part > threshold).sum().item() for part in activation.split(1024))
            active[place] = positives / activation.numel()
    needs = dense.ranks.sum(active.to(dense.model.device)).clamp(min=1e-4).tolist()
    if layers[0] == 0 and len(needs) > 1:
        needs[0] = min(needs[0], sum(needs[1:]) / (len(needs) - 1))
    return needs


def _widths(facts: ModelFacts, config: TrainConfig, needs: list[float]) -> dict[str, list[int]]:
    """r of every predictor to train."""
    if config.rank is not None:
        return {"mlp": [config.rank] * len(needs), "heads": [config.head_rank] * len(needs)}
    # The root of the share of active neurons: measured on opt-7m, where ranks in proportion to the share itself starve
    # the layers with 2 and 5 % (rank 20 in place of 10 takes two thirds off the error of the former).
    by_unit = {"mlp": [need**0.5 for need in needs], "heads": [1.0] * len(needs)}
    return ranks_within(config.max_parameters, facts.block_parameters, facts.hidden_size, facts.units, by_unit)
