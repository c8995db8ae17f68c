"""The rounds of a training, which can be left and found again."""

import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from dejavu_ds.collect import Collector
from dejavu_ds.resume import check_same_arguments, read_checkpoint, write_checkpoint
from dejavu_ds.sharded import Ranks
from dejavu_ds.taps import UNITS
from dejavu_ds.train_config import TrainConfig
from dejavu_ds.unit_trainer import UnitTrainer

Trainers = dict[tuple[str, int], UnitTrainer]
"""{(unit, layer): trainer}"""


class Rounds:
    """The rounds of all epochs, with the place in them, so that it can be left and found again."""

    def __init__(
        self,
        collector: Collector,
        windows: torch.Tensor,
        validation: torch.Tensor,
        trainers: Trainers,
        config: TrainConfig,
        ranks: Ranks,
    ):
        self._collector, self._windows, self._validation = collector, windows, validation
        self._trainers, self._config, self._ranks = trainers, config, ranks
        self._generator = torch.Generator().manual_seed(config.seed)
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
        rounds = self._ranks.gathered(None if checkpoint is None else checkpoint[0]["rounds"])
        if len(set(rounds)) > 1:
            raise ValueError(f"the processes' checkpoints {path.parent} are of different rounds {rounds}: remove them")
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
        quiet = self._ranks.rank > 0
        # The unit of the bar gives tokens/s; the losses are the layers' in order, "-" for one that has stopped.
        with tqdm(total=total, initial=done, unit="tok", unit_scale=True, desc="training", disable=quiet) as bar:
            while self._done < self._config.epochs * self._rounds:
                running = sum(not trainer.stopped for trainer in self._trainers.values())
                if self._total(running) == 0:
                    break
                losses = {k: v for part in self._ranks.gathered(self._round(bar)) for k, v in part.items()}
                shown = {unit: " ".join(v for k, v in losses.items() if k[0] == unit) for unit in UNITS}
                bar.set_postfix({unit: text for unit, text in shown.items() if text})
                self._save_if_due()

    def _round(self, bar: tqdm) -> dict[tuple[str, int], str]:
        position = self._done % self._rounds
        if position == 0:
            self._order = torch.randperm(len(self._windows), generator=self._generator)
        chosen = self._order[position * self._per_round :][: self._per_round]
        records = self._collector.collect(self._windows[chosen])
        losses = {}
        for key, trainer in self._trainers.items():
            loss = trainer.learn(records)
            losses[key] = "-" if math.isnan(loss) else f"{loss:.3f}"
        self._done += 1
        bar.update(chosen.numel() * self._config.context)
        if position == self._rounds - 1:
            records = self._collector.collect(self._validation)
            for trainer in self._trainers.values():
                trainer.check(records)
        return losses

    def _save_if_due(self) -> None:
        # The first rank's clock decides for all.
        due = self._ranks.rank == 0 and time.monotonic() - self._saved_at >= self._save_every
        if self._path is None or not self._total(int(due)):
            return
        content = {"arguments": self._arguments, "rounds": self._done, "trainers": {}}
        tensors = {"order": self._order, "generator": self._generator.get_state()}
        for (unit, layer), trainer in self._trainers.items():
            content["trainers"][f"{unit}.{layer}."] = trainer.numbers()
            tensors |= {f"{unit}.{layer}.{name}": tensor for name, tensor in trainer.tensors().items()}
        write_checkpoint(self._path, content, tensors, self._ranks.barrier)
        self._saved_at = time.monotonic()

    def _total(self, number: int) -> int:
        """Over the ranks."""
        return int(self._ranks.sum(torch.tensor([number], device=self._collector.device)).item())
