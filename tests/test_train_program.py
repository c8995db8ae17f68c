"""The training program, and the predictors that come with the package."""

import json
import os
import sys
import time

import pytest
import torch

from dejavu_ds.checkpoint import bundled_model, load_model
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.launch import train_predictors
from dejavu_ds.launch.train_predictors import main
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.resume import CHECKPOINT_FILE

SENTENCES = [
    "The river rose in the night and carried the bridge away.",
    "Nobody in the village had seen so much water before.",
    "They waited on the hill until the morning came.",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The program would take every core, and leave them taken for the tests after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """(output folder, what was printed) of one small run on the bundled model."""
    folder = tmp_path_factory.mktemp("train")
    texts = [" ".join(SENTENCES[i % 3 :] + SENTENCES[: i % 3]) + f" It was day {i}." for i in range(20)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = {"data": folder / "text.jsonl", "out": folder / "set", "samples": 18, "rank": 4, "epochs": 1}
    options |= {"context": 32, "buffer-tokens": 256, "lookahead": "none", "first-layer-density": 0.5, "local_rank": 0}
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("rich.console.Console.print", lambda _, table: printed.append(table))
        main([f"--{name}={value}" for name, value in options.items()])
    return folder / "set", printed


def test_program_saves_a_set_for_its_model(program):
    predictors = PredictorSet.from_pretrained(program[0])
    predictors.check(fingerprint(load_model(bundled_model(), torch.float16)), 6, "none")
    assert [p.rank for p in predictors.mlp] == [4] * 6
    assert [p.rank for p in predictors.heads] == [2] * 6
    assert predictors.mlp[0].w1.dtype == torch.float16
    assert str(program[0].parent) not in (program[0] / "predictors.json").read_text()


def test_program_reports_every_layer(program):
    mlp, heads = program[1]
    for table in (mlp, heads):
        assert [column.header for column in table.columns] == [
            "layer", "active", "rank", "density", "recall", "precision", "error", "kept",
        ]  # fmt: skip
        assert table.row_count == 6


def test_a_finished_set_is_not_trained_over(program, capsys, monkeypatch):
    monkeypatch.setattr(train_predictors, "_load", lambda _: pytest.fail("loaded"))
    files = {path: path.read_bytes() for path in program[0].iterdir()}
    with pytest.raises(SystemExit) as stop:
        main([f"--data={program[0].parent / 'text.jsonl'}", f"--out={program[0]}"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert f"--out {program[0]} holds a finished set (predictors.json): choose another folder or remove it" in line
    assert {path: path.read_bytes() for path in program[0].iterdir()} == files


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupt_says_how_to_go_on(saved, tmp_path, capsys, monkeypatch):
    def interrupted(dense, tokenizer, documents, config, data_name, folder, save_minutes):
        if saved:
            (tmp_path / CHECKPOINT_FILE).touch()
            os.utime(tmp_path / CHECKPOINT_FILE, (at, at))
        raise KeyboardInterrupt

    at = time.mktime((2026, 3, 1, 9, 5, 59, 0, 0, -1))
    monkeypatch.setattr(train_predictors, "train_predictors", interrupted)
    (tmp_path / "text.txt").write_text("\n\n".join(SENTENCES))
    with pytest.raises(SystemExit) as stop:
        main([f"--data={tmp_path / 'text.txt'}", f"--out={tmp_path}"])
    said = {
        True: "interrupted; the same command goes on from the checkpoint of 09:05",
        False: "interrupted before the first checkpoint: the same command begins anew",
    }
    assert stop.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"train_predictors.py: {said[saved]}"


@pytest.mark.parametrize(("criterion", "learnt"), [("contribution", "size"), ("norm", "size"), ("plainact", "label")])
def test_what_heads_learn_by_default(criterion, learnt, tmp_path, monkeypatch):
    configs = []
    monkeypatch.setattr(train_predictors, "_train", lambda _, config: configs.append(config) or sys.exit())
    with pytest.raises(SystemExit):
        main([f"--out={tmp_path}", "--data-free", f"--criterion={criterion}"])
    assert configs[0].head_loss == learnt


def test_help_says_every_default_once(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: size; label for plainact) --head-label-density" in text
    assert "(default: 6)" in text and "(default: None)" not in text


def test_help_defines_the_terms(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for term in ("label", "criterion", "threshold", "density", "recall", "precision", "error", "kept"):
        assert f"\n  {term} " in text


def test_bundled_predictors_fit_the_bundled_model():
    predictors = PredictorSet.from_pretrained(bundled_model() / "predictors")
    predictors.check(fingerprint(load_model(bundled_model(), torch.bfloat16)), 6, "half")
    # Layer 0 is dense; a set that gave all layers one density would waste it on layer 1, with 2 % active neurons.
    row = predictors.densities("mlp", 0.2)
    assert row[0] == 1.0 and row[1] < 0.1
    size = sum(path.stat().st_size for path in (bundled_model() / "predictors").iterdir())
    assert size <= 1.3e6


@pytest.mark.parametrize("options", [[], ["--data=a.txt", "--data-free"]])
def test_text_comes_from_one_place(options, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([f"--out={tmp_path}", *options])
    assert stop.value.code == 2 and "--data, or --data-free" in capsys.readouterr().err


def test_text_of_the_model_and_a_promise(tmp_path, capsys):
    """Without a file: within the budget of parameters, the default densities keep what was asked for."""
    options = {"out": tmp_path, "samples": 12, "context": 32, "buffer-tokens": 256, "epochs": 1}
    options |= {"max-parameters": 0.03, "max-perplexity-increase": "2%", "lookahead": "none"}
    main(["--data-free", *(f"--{name}={value}" for name, value in options.items())])
    predictors = PredictorSet.from_pretrained(tmp_path)
    model = load_model(bundled_model(), torch.float32)
    blocks = sum(p.numel() for p in model.model.decoder.layers.parameters())
    assert 0.029 * blocks < predictors.num_parameters() <= 0.03 * blocks
    promise = predictors.metadata["promise"]
    assert promise["max_perplexity_increase"] == 0.02 and promise["confirmed"] <= 0.02
    assert promise["densities"] == {unit: predictors.default_density(unit) for unit in ("mlp", "heads")}
    assert f"rises by {promise['confirmed']:.2%} on validation text" in capsys.readouterr().out
    assert predictors.metadata["tokens"]["data"] == "sampled from the model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictors.json", "predictors.safetensors"]


def test_a_split_model_has_no_promise(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", sys.exit)  # which is how a rank of several leaves
    with pytest.raises(SystemExit):
        main([f"--out={tmp_path}", "--data-free", "--max-perplexity-increase=1%"])
    assert "runs in one process, the launcher started 2" in capsys.readouterr().err
