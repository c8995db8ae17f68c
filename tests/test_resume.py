"""A training that is stopped and started again ends like one that was not."""

import errno
import os

import pytest
import torch
from training import QUICK, WordTokenizer, tensors_of, tiny_model, token_rows

from dejavu_ds import resume, rounds
from dejavu_ds.collect import Collector
from dejavu_ds.resume import CHECKPOINT_FILE, read_checkpoint, write_checkpoint
from dejavu_ds.train import TrainConfig, remove_checkpoint, train_predictors

SETTINGS = {**QUICK, "epochs": 3, "patience": 1}
CONFIG = TrainConfig(**SETTINGS)


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def documents():
    return token_rows()[:40]


def train_until(model, documents, folder, passes: int):
    """Train with a checkpoint after every round, and be killed when text is run for the time after `passes`."""
    collect, left = Collector.collect, [passes]

    def failing(self, windows):
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        return collect(self, windows)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Collector, "collect", failing)
        train_predictors(model, WordTokenizer(), documents, CONFIG, "rows", folder, save_minutes=0)


# 37 documents: three rounds an epoch, and a check after each epoch; one pass comes before.
@pytest.mark.parametrize("stops", [(2,), (6,), (3, 7)])
def test_goes_on_to_the_same_bits(model, documents, tmp_path, stops):
    whole = train_predictors(model, WordTokenizer(), documents, CONFIG, "rows")
    for stop in stops:
        train_until(model, documents, tmp_path, stop)
        assert (tmp_path / CHECKPOINT_FILE).exists()
    resumed = train_predictors(model, WordTokenizer(), documents, CONFIG, "rows", tmp_path, save_minutes=0)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(whole), tensors_of(resumed), strict=True))
    assert resumed.budgets == whole.budgets and resumed.metadata == whole.metadata
    remove_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_does_not_begin_again(model, documents, tmp_path):
    train_until(model, documents, tmp_path, 6)
    # One pass before the first round, three rounds, a check, one more round.
    assert read_checkpoint(tmp_path / CHECKPOINT_FILE)[0]["rounds"] == 4
    passes, collect = [], Collector.collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "collect", lambda self, windows: passes.append(1) or collect(self, windows))
        train_predictors(model, WordTokenizer(), documents, CONFIG, "rows", tmp_path)
    assert len(passes) <= 1 + (9 - 4) + 2 + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed 0 then, 1 now"),
        ({"rank": 8, "head_rank": 8}, "rank 16 then, 8 now"),
        ({"criterion": "norm"}, "criterion 'contribution' then, 'norm' now"),
    ],
)
def test_other_arguments_are_refused(model, documents, tmp_path, change, message):
    train_until(model, documents, tmp_path, 3)
    with pytest.raises(ValueError, match=message):
        train_predictors(model, WordTokenizer(), documents, TrainConfig(**{**SETTINGS, **change}), "rows", tmp_path)


def test_other_text_and_model_are_refused(model, documents, tmp_path):
    train_until(model, documents, tmp_path, 3)
    with pytest.raises(ValueError, match="other arguments: text"):
        train_predictors(model, WordTokenizer(), documents[::-1], CONFIG, "rows", tmp_path)
    other = tiny_model()
    other.model.decoder.layers[0].fc1.weight.data += 0.1
    with pytest.raises(ValueError, match="other arguments: model"):
        train_predictors(other, WordTokenizer(), documents, CONFIG, "rows", tmp_path)


def test_a_broken_checkpoint_is_refused(model, documents, tmp_path):
    path = tmp_path / CHECKPOINT_FILE
    train_until(model, documents, tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"training\.safetensors is corrupt .* remove it"):
        train_predictors(model, WordTokenizer(), documents, CONFIG, "rows", tmp_path)
    path.write_bytes(resume.serialize({"w": torch.zeros(2)}))
    with pytest.raises(ValueError, match="no checkpoint that this program reads"):
        train_predictors(model, WordTokenizer(), documents, CONFIG, "rows", tmp_path)


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / CHECKPOINT_FILE
    write_checkpoint(path, {"rounds": 1}, {"w": torch.ones(3)})

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"training\.safetensors \(.* bytes\): No space left .* make room"):
        write_checkpoint(path, {"rounds": 2}, {"w": torch.zeros(3)})
    content, tensors = read_checkpoint(path)
    assert content == {"rounds": 1} and tensors["w"].tolist() == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoints_are_written_now_and_then_only(model, documents, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(rounds, "write_checkpoint", lambda *arguments: written.append(arguments))
    train_predictors(model, WordTokenizer(), documents, CONFIG, "rows", tmp_path, save_minutes=60)
    assert written == []
