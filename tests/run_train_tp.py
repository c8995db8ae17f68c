"""Run under the launcher by test_train_tp.py: training over any number of processes, the set to a folder.

deepspeed --num_gpus N tests/run_train_tp.py FOLDER [STOP]    STOP: be killed after so many passes over text

The model is read from the checkpoint FOLDER/model, each rank its part; without one it is made and then split.
"""

import os
import sys
from pathlib import Path

import torch
from training import QUICK, WordTokenizer, tiny_model, token_rows

from dejavu_ds.checkpoint import open_checkpoint
from dejavu_ds.collect import Collector
from dejavu_ds.launch.common import leave_job
from dejavu_ds.sharded import DenseModel
from dejavu_ds.train import TrainConfig, train_predictors


class Stopped(Exception):
    pass


def stop_after(passes: int) -> None:
    """Let the next pass over text raise."""
    collect, left = Collector.collect, [passes]

    def failing(self, windows):
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        return collect(self, windows)

    Collector.collect = failing


def main() -> None:
    arguments = [arg for arg in sys.argv[1:] if not arg.startswith("--local")]
    torch.set_num_threads(1)
    config = TrainConfig(**{**QUICK, "epochs": 2, "criterion": "contribution"})
    if len(arguments) > 1:
        stop_after(int(arguments[1]))
    checkpoint = Path(arguments[0]) / "model"
    parts = open_checkpoint(checkpoint, torch.float32) if checkpoint.exists() else (tiny_model(),)
    dense = DenseModel.split(*parts)
    try:
        predictors = train_predictors(dense, WordTokenizer(), token_rows()[:40], config, "rows", arguments[0], 0)
    except Stopped:
        return
    if int(os.environ["RANK"]) == 0:
        predictors.save_pretrained(arguments[0], torch.float32)


if __name__ == "__main__":
    main()
    leave_job()
