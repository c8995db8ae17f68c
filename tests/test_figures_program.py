"""The figures program: a picture and its numbers for each figure, with and without predictors."""

import hashlib
import json
import shutil

import pytest
from models import bundled
from PIL import Image
from test_evaluate_program import TEXT

from dejavu_ds.baselines import SELECTIONS
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.launch import figures


@pytest.fixture
def files(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    item = {"query": "He opened the", "choices": ["door", "sky and the sea"], "gold": 0}
    (tmp_path / "choice.jsonl").write_text(json.dumps(item) + "\n" + json.dumps({**item, "gold": 1}) + "\n")
    return tmp_path


def draw(files, *more):
    arguments = ["--data", files / "text.jsonl", "--context", 16, "--windows", 2, "--dtype", "fp32"]
    figures.main([str(a) for a in (*arguments, "--out", files / "out", *more)])
    data = {path.stem: json.loads(path.read_text()) for path in (files / "out").glob("*.json")}
    for name in data:
        with Image.open(files / "out" / f"{name}.png") as picture:
            assert picture.width > 600 and picture.height > 400
            assert len(picture.convert("L").getcolors()) > 10
    return data


def test_all_figures(files):
    more = ["--mlp-density", ".3", "--head-density", ".5", "--calibration", files / "text.jsonl"]
    data = draw(files, *more, "--task-file", f"choice={files / 'choice.jsonl'}")
    assert set(data) == set(figures.FIGURES)
    for figure in data.values():
        found = figure["conditions"]
        assert set(found["sha256"]) == {"data", "calibration", "predictors", "task choice"}
        assert found["sha256"]["data"] == hashlib.sha256((files / "text.jsonl").read_bytes()).hexdigest()
        assert found["command"].startswith("launch/figures.py --data text.jsonl --context 16")
    rows = data["density"]["rows"]
    assert len(rows) == 2 * (1 + len(SELECTIONS) * 2)
    assert {row["metric"] for row in rows} == {"perplexity", "acc"}
    for row in rows:
        other = {"mlp": "head_density", "heads": "mlp_density"}.get(row["unit"])
        assert other is None or row[other] == 1.0
    layers = bundled().config.num_hidden_layers
    assert len(data["idle"]["idle_heads"]) == len(data["stream"]["cosine"]) == layers
    # A larger batch's union is a superset of its parts'.
    means = [sum(values) for values in data["union"]["active_union"].values()]
    assert means == sorted(means) and len(means) == 5
    recall = data["recall"]["neuron_recall"]
    assert recall[0] is None and all(0 < value <= 1 for value in recall[1:])
    assert data["recall"]["asked"]["mlp"][0] == 1.0


def test_a_model_without_predictors(files):
    model = shutil.copytree(bundled_model(), files / "model", ignore=shutil.ignore_patterns("predictors"))
    data = draw(files, "--model", model, "--mlp-density", ".3", "--head-density", ".5")
    assert set(data) == {"idle", "density", "stream", "union"}
    assert {row["selection"] for row in data["density"]["rows"]} == {None, "oracle", "random"}


def test_only_what_is_asked_for(files):
    assert set(draw(files, "--only", "idle", "recall", "--recall-density", ".1", ".5")) == {"idle", "recall"}


def test_without_text(files, capsys):
    with pytest.raises(SystemExit) as exit_:
        figures.main(["--data", str(files / "absent.jsonl"), "--out", str(files / "out")])
    assert exit_.value.code == 2 and "absent.jsonl" in capsys.readouterr().err.splitlines()[-1]
