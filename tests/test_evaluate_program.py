"""The evaluation program: its figures against Hugging Face's, its JSON, its errors, and it under the launcher."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import bundled
from test_tp import free_port
from transformers import AutoTokenizer

from dejavu_ds.baselines import SELECTIONS
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.launch import evaluate
from dejavu_ds.text import cut_windows, token_ids

ROOT = Path(__file__).parents[1]
KEYS = {
    *("model", "mode", "selection", "criterion", "lookahead", "mlp_density", "head_density", "quantize", "task"),
    *("value", "stderr", "tokens", "metric", "asked_mlp_density", "asked_head_density"),
}
TEXT = [
    "The king sat down and spoke to the people of the town, who had waited since the morning.",
    "In the spring of that year the river rose, and the old bridge was carried away by the water.",
    "She opened the letter slowly, for she knew the hand, and read it twice before she said a word.",
]


@pytest.fixture
def files(tmp_path):
    """A text, and a task of either form."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    (tmp_path / "cloze.jsonl").write_text(
        json.dumps({"context": "The old king of the", "continuation": "world"}) + "\n"
    )
    item = {"query": "He opened the", "choices": ["door", "sky and the sea"], "gold": 0}
    (tmp_path / "choice.jsonl").write_text(json.dumps(item) + "\n" + json.dumps({**item, "gold": 1}) + "\n")
    return tmp_path


def arguments(files, *more):
    return [
        "--data",
        files / "text.jsonl",
        "--context",
        16,
        "--dtype",
        "fp32",
        "--out",
        files / "out" / "r.json",
        *more,
    ]


def run(files, *more):
    evaluate.main([str(arg) for arg in arguments(files, *more)])
    results = json.loads((files / "out" / "r.json").read_text())
    assert all(row.keys() == KEYS for row in results["rows"])
    assert [path.name for path in (files / "out").iterdir()] == ["r.json"]
    return results


def test_every_selection_in_every_mode(files, capsys):
    more = ["--mode", "decode", "dense", "masked", "--selection", *SELECTIONS, "--mlp-density", ".2"]
    more += ["--calibration", files / "text.jsonl", "--calibration-windows", 2, "--windows", 4]
    results = run(files, *more, "--task-file", f"cloze={files / 'cloze.jsonl'}")
    rows = results["rows"]
    assert len(rows) == 9 * 3
    assert [(r["task"], r["metric"]) for r in rows[:3]] == [
        ("perplexity", "perplexity"),
        ("cloze", "perplexity"),
        ("cloze", "acc"),
    ]
    sparse = {(mode, selection) for mode in ("decode", "masked") for selection in SELECTIONS}
    assert {(r["mode"], r["selection"]) for r in rows} == {("dense", None), *sparse}
    by = {(r["mode"], r["selection"], r["task"]): r for r in rows if r["metric"] == "perplexity"}
    windows = cut_windows(token_ids(TEXT, AutoTokenizer.from_pretrained(bundled_model())), 16)[:4]
    with torch.no_grad():
        wanted = math.exp(bundled()(windows, labels=windows).loss.item())
    dense = by["dense", None, "perplexity"]
    assert dense["value"] == pytest.approx(wanted, rel=1e-4) and dense["tokens"] == windows[:, 1:].numel()
    assert dense["mlp_density"] == dense["head_density"] == 1.0
    for mode in ("decode", "masked"):
        value = {name: by[mode, name, "perplexity"]["value"] for name in SELECTIONS}
        # Far apart on any text: these two look at the token, those do not.
        assert max(value["predictor"], value["oracle"]) < min(value["static"], value["random"])
        assert by[mode, "oracle", "perplexity"]["mlp_density"] == pytest.approx(1 / 3, abs=0.005)
    assert by["decode", "predictor", "cloze"]["lookahead"] == "half"
    assert (
        by["decode", "oracle", "cloze"]["criterion"] == "norm" and by["decode", "oracle", "cloze"]["lookahead"] is None
    )
    lines = [re.split(r" *[│┃] *", line)[1:-1] for line in capsys.readouterr().out.splitlines()]
    header, *table = [line for line in lines if line]
    assert header[:5] == ["mode", "selection", "asked MLP", "asked head", "task"]
    assert {(line[0], line[2], line[3]) for line in table} == {
        ("dense", "-", "-"),
        ("masked", "0.200", "-"),
        ("decode", "0.200", "-"),
    }


def test_conditions_say_which_files_and_which_code(files):
    more = ["--mode", "masked", "--windows", 1, "--calibration", files / "text.jsonl", "--commit", "abcdef"]
    found = run(files, *more, "--task-file", f"cloze={files / 'cloze.jsonl'}")["conditions"]
    text, cloze = (hashlib.sha256((files / f"{name}.jsonl").read_bytes()).hexdigest() for name in ("text", "cloze"))
    stored = json.loads((bundled_model() / "predictors" / "predictors.json").read_text())["sha256"]
    assert found["sha256"] == {"data": text, "calibration": text, "task cloze": cloze, "predictors": stored}
    assert found["data"] == found["calibration"] == "text.jsonl"
    assert found["commit"] == "abcdef" and found["versions"]["torch"] == torch.__version__
    assert found["command"].startswith("launch/evaluate.py --data text.jsonl --context 16 ")
    dense = run(files, "--dense", "--windows", 1)["conditions"]
    assert dense["sha256"] == {"data": text} and dense["calibration"] is None
    assert dense["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", dense["commit"])


def test_baselines_at_the_densities_that_predictors_realise(files):
    more = ["--mode", "masked", "--selection", "predictor", "oracle", "--mlp-density", ".1", ".3", "--match-realised"]
    rows = run(files, *more)["rows"]
    of = {(r["selection"], r["asked_mlp_density"]): r["mlp_density"] for r in rows}
    for asked in (0.1, 0.3):
        # Rounded to whole neurons: half of one in 1024, at most.
        assert of["oracle", asked] == pytest.approx(of["predictor", asked], abs=1 / 1024)
    assert of["oracle", 0.1] < of["oracle", 0.3]


def test_a_model_without_predictors(files):
    model = shutil.copytree(bundled_model(), files / "model", ignore=shutil.ignore_patterns("predictors"))
    rows = run(files, "--model", model, "--selection", "oracle", "--mlp-density", ".4", "--mode", "masked")["rows"]
    assert rows[0]["mlp_density"] == pytest.approx((1 + 5 * 0.4) / 6, abs=0.001)
    assert run(files, "--model", model, "--dense")["rows"][0]["mode"] == "dense"


@pytest.mark.parametrize(
    "more, message",
    [
        (["--selection", "static"], "--selection static needs --calibration"),
        (["--selection", "oracle", "--match-realised"], "--match-realised needs --data, and predictor"),
        (["--task-file", "copa"], "expected NAME=FILE"),
        (["--mlp-density", "0"], r"must be in (0, 1]"),
        (["--task-file", "a=absent.jsonl"], "cannot read absent.jsonl"),
        (["--context", "100000"], "do not fill one window of 100000"),
        (["--dense", "--mlp-density", ".2"], "--dense and --mlp-density exclude each other"),
        (["--lookahead", "full"], "'half'"),
    ],
)
def test_bad_input_is_one_line(more, message, files, capsys):
    with pytest.raises(SystemExit) as exit_:
        evaluate.main([str(arg) for arg in arguments(files, *more)])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and message in err.splitlines()[-1]
    assert not (files / "out" / "r.json").exists()


def test_nothing_to_measure(capsys):
    with pytest.raises(SystemExit):
        evaluate.main([])
    assert "give --data, --task or --task-file" in capsys.readouterr().err


def environment():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_the_program_is_not_taken_for_the_package_evaluate(tmp_path):
    """lm-eval imports the package of that name; Python puts the program's folder before it on the path."""
    command = [sys.executable, "-i", str(ROOT / "launch" / "evaluate.py"), "--help"]
    code = "import evaluate\nprint('found', evaluate.__file__)\n"
    done = subprocess.run(command, input=code, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert "site-packages" in found and "launch" not in found


def test_two_ranks_give_the_result_of_one(files):
    """The launcher starts the script by its path; the selections are over the units of both ranks."""
    more = ["--mode", "masked", "decode", "--selection", *SELECTIONS]
    more += ["--mlp-density", ".2", "--head-density", ".75", "--calibration", files / "text.jsonl"]
    more += ["--task-file", f"choice={files / 'choice.jsonl'}"]
    want = run(files, *more)["rows"]
    beside = Path(sys.executable).parent / "deepspeed"
    command = [sys.executable, str(beside) if beside.exists() else shutil.which("deepspeed"), "--num_gpus", "2"]
    command += [
        "--master_port",
        str(free_port()),
        str(ROOT / "launch" / "evaluate.py"),
        *map(str, arguments(files, *more)),
    ]
    (files / "out" / "r.json").unlink()
    done = subprocess.run(command, env=environment(), cwd=files, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads((files / "out" / "r.json").read_text())
    assert got["conditions"]["tp"] == 2
    for one, two in zip(want, got["rows"], strict=True):
        assert two.pop("value") == pytest.approx(one.pop("value"), rel=1e-4)
        for key in ("mlp_density", "head_density"):
            assert two.pop(key) == pytest.approx(one.pop(key), abs=1e-4)
        assert two.pop("stderr") == pytest.approx(one.pop("stderr"), rel=1e-3)
        assert two == one
