"""Training of a model that is split over processes: the set that one process trains, and resumed alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_tp import TESTS, free_port, python_path
from training import QUICK, WordTokenizer, tensors_of, tiny_model, token_rows

from dejavu_ds.collect import Collector
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.sharded import DenseModel, ModelFacts, Ranks
from dejavu_ds.train import TrainConfig, train_predictors

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a rank needs a GPU of its own")


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [sys.executable, str(launcher)] if launcher.exists() else ["deepspeed"]
    command += ["--num_gpus", "2", "--master_port", str(free_port()), str(TESTS / "run_train_tp.py"), str(folder)]
    done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> PredictorSet:
    """Trained by two processes, each of which reads its part of a checkpoint, without a stop."""
    folder = tmp_path_factory.mktemp("split")
    tiny_model().save_pretrained(folder / "model")
    launch(folder)
    return PredictorSet.from_pretrained(folder)


def test_two_processes_train_what_one_does(split):
    config = TrainConfig(**{**QUICK, "epochs": 2, "criterion": "contribution"})
    alone = train_predictors(tiny_model(), WordTokenizer(), token_rows()[:40], config, "rows")
    assert all(split.fingerprint[part] == alone.fingerprint[part] for part in ("config", "weights"))
    assert split.metadata["tokens"] == alone.metadata["tokens"]
    # The same steps from the same weights; sums over ranks are rounded otherwise than those of one.
    for a, b in zip(tensors_of(split), tensors_of(alone), strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()
    for unit in ("mlp", "heads"):
        for a, b in zip(split.metadata["layers"][unit], alone.metadata["layers"][unit], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a["kept"] == pytest.approx(b["kept"], abs=0.01)
                assert a["active"] == pytest.approx(b["active"], abs=1e-3)


def test_resumed_training_of_two_processes_ends_with_the_same_bits(split, tmp_path):
    """Of a model that was whole before it was split, too."""
    launch(tmp_path, "5")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["training.0-of-2.safetensors", "training.1-of-2.safetensors"]
    with pytest.raises(ValueError, match="another number of processes than 1"):
        config = TrainConfig(**{**QUICK, "epochs": 2, "criterion": "contribution"})
        train_predictors(tiny_model(), WordTokenizer(), token_rows()[:40], config, "rows", tmp_path)
    launch(tmp_path)
    resumed = PredictorSet.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(split), tensors_of(resumed), strict=True))


def test_plainact_of_a_split_model_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="plainact takes a backward pass"):
        Collector(DenseModel(model, ModelFacts.of(model), Ranks(0, 2)), 32, ("heads",))


def test_every_rank_owns_a_run_of_layers():
    for layers, size in ((7, 3), (96, 8), (4, 4), (5, 1)):
        owners = [Ranks(0, size).owner(layer, layers) for layer in range(layers)]
        assert owners == sorted(owners) and set(owners) == set(range(size))
