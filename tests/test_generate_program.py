"""The generation program: its text against Hugging Face's, its figures against their formulas, its errors."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import PROMPTS, bundled, tiny_opt
from transformers import AutoTokenizer

from dejavu_ds import plan
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.launch import generate, train_predictors
from dejavu_ds.predictor import PredictorSet

ROOT = Path(__file__).parents[1]
# fp32 on a GPU too, where "auto" would take the checkpoint's fp16 and greedy tokens could differ from Hugging Face's.
FP32 = ["--dtype", "fp32"]
KEYS = [
    "prompt",
    "text",
    "new_tokens",
    "tokens_per_s",
    "mlp_density",
    "head_density",
    "weight_bytes_read",
    "tp",
    "quantize",
]


@pytest.fixture(autouse=True)
def threads_left_alone(monkeypatch):
    """The program takes every core unless told otherwise, which would slow the tests after these."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def program(capsys):
    """Run the program in this process; returns the JSON object and all of standard output."""

    def run(*argv: str) -> tuple[dict, str]:
        generate.main([*FP32, "--json", *argv])
        out = capsys.readouterr().out
        return json.loads(out.splitlines()[-1]), out

    return run


@pytest.fixture
def refused(capsys):
    """Run a program on bad input; returns its one line of complaint."""

    def run(*argv: str, main=generate.main) -> str:
        with pytest.raises(SystemExit) as exit_:
            main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        assert exit_.value.code == 2 and out == ""
        (line,) = complaints(err)
        assert "error: " in line
        return line

    return run


def complaints(text: str) -> list[str]:
    """Lines of standard error that are neither a progress bar nor a log line of DeepSpeed or its launcher."""
    lines = re.split(r"[\r\n]+", text)
    return [line for line in lines if line and "Loading weights" not in line and not line.startswith("[20")]


def hf_text(model, prompt: str, new_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """Folder of a random OPT of other sizes, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    tiny_opt(vocab_size=8192).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, folder)
    return folder


@pytest.fixture
def predictors_copy(tmp_path):
    for path in (bundled_model() / "predictors").iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


# ---- text


def test_dense_is_hugging_face(program):
    figures, _ = program("--dense", "--max-new-tokens", "24")
    assert figures["prompt"] == generate.SAMPLE_PROMPT
    assert figures["text"] == hf_text(bundled(), generate.SAMPLE_PROMPT, 24)
    assert figures["mlp_density"] == figures["head_density"] == 1.0


def test_another_model_without_predictors(program, other_model):
    figures, _ = program("--model", str(other_model), "--dense", "--max-new-tokens", "5", "--prompt", PROMPTS[3])
    assert figures["text"] == hf_text(tiny_opt(vocab_size=8192), PROMPTS[3], 5)


def test_every_unit_kept_is_dense(program):
    options = ("--mlp-density", "1", "--head-density", "1", "--prompt", PROMPTS[1], "--max-new-tokens", "24")
    assert program(*options)[0]["text"] == hf_text(bundled(), PROMPTS[1], 24)


def test_prompt_and_continuation_are_streamed(program):
    figures, out = program("--max-new-tokens", "12")
    assert figures["text"].strip() and figures["new_tokens"] == 12
    assert out.startswith(figures["prompt"] + figures["text"] + "\n")


def test_what_is_logged_waits_for_the_end_of_the_text(capsys, monkeypatch):
    """On one terminal, where both streams come together."""
    first = plan._WARM_UP + plan._REPEATS  # steps of the first way measured, the sparse one
    steps = []
    monkeypatch.setattr(plan, "_milliseconds", lambda step, _: steps.append(step()) or (2.0, 1.0)[len(steps) > first])
    monkeypatch.setattr("sys.stderr", sys.stdout)
    generate.main([*FP32, "--mode", "auto", "--max-new-tokens", "12", "--json"])
    out = capsys.readouterr().out
    *_, said, closing, figures = filter(None, out.splitlines())
    text = generate.SAMPLE_PROMPT + json.loads(figures)["text"]
    assert text in out and out.index(text) < out.index(said)
    assert said == "batch of 1: MLP runs dense: 1.000 ms a step, 2.000 ms sparse" and "tokens/s" in closing


def test_without_json_there_is_none(capsys):
    generate.main([*FP32, "--max-new-tokens", "2"])
    out = capsys.readouterr().out
    assert "{" not in out and "tokens/s" in out


@pytest.mark.parametrize("option", ["--prompt", "--prompt-file"])
def test_prompt_from_standard_input(option, program, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS[2] + "\n"))
    assert program(option, "-", "--max-new-tokens", "2")[0]["prompt"] == PROMPTS[2]


def test_prompt_from_a_file(program, tmp_path):
    text = "Il était une fois\n\na king"
    (tmp_path / "prompt.txt").write_text(text + "\n", encoding="utf-8")
    figures, _ = program("--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "2")
    assert figures["prompt"] == text


def test_the_seed_decides_the_draws(program):
    def draw(seed):
        return program("--temperature", "1.2", "--top-p", ".95", "--seed", seed, "--max-new-tokens", "16")[0]["text"]

    first = draw("1")
    assert draw("1") == first
    assert draw("2") != first


def test_the_launchers_argument_is_taken(program):
    assert program("--local_rank=0", "--max-new-tokens", "1")[0]["new_tokens"] == 1


# ---- figures


def test_bytes_follow_from_the_densities(program):
    D, F, L, V = 256, 1024, 6, 8192
    stored = json.loads((bundled_model() / "predictors" / "predictors.json").read_text())["predictors"]["mlp"]
    ranks = [entry["rank"] for entry in stored if entry is not None]
    neurons = 2 * D * F + F
    # Attention with its biases, neurons, the bias of fc2, two layer norms; the head.
    dense = 4 * (L * (4 * D * D + 4 * D + neurons + D + 4 * D) + V * D)
    # In fp32 four elements are 16 bytes, of which every row of the second layer has whole ones.
    mlp_predictors = 4 * sum(r * D + r + F * r + F for r in (-(-rank // 4) * 4 for rank in ranks))
    assert program("--dense", "--max-new-tokens", "8")[0]["weight_bytes_read"] == dense
    figures, out = program("--max-new-tokens", "24")
    assert list(figures) == KEYS and figures["tp"] == 1 and figures["head_density"] == 1.0
    read = dense - 4 * L * neurons * (1 - figures["mlp_density"]) + mlp_predictors
    assert figures["weight_bytes_read"] == pytest.approx(read, abs=1)
    assert f"{read / dense:.3f} of the dense" in out


def test_the_density_asked_for_is_the_mean_over_later_layers(program):
    for asked in (0.1, 0.5):
        figures, _ = program("--mlp-density", str(asked), "--max-new-tokens", "64")
        assert figures["mlp_density"] == pytest.approx((1 + 5 * asked) / 6, abs=0.06)


def test_fewer_heads_are_read(program):
    every = program("--max-new-tokens", "16")[0]
    some = program("--max-new-tokens", "16", "--head-density", ".5")[0]
    assert some["head_density"] < 0.9 and some["weight_bytes_read"] < every["weight_bytes_read"]


def test_one_token_has_no_decode_step_to_report(program):
    figures, out = program("--max-new-tokens", "1", "--stats")
    assert figures["mlp_density"] is figures["head_density"] is figures["weight_bytes_read"] is None
    assert "no decode step" in out


def test_table_of_densities(program):
    figures, out = program("--stats", "--max-new-tokens", "8")
    rows = re.findall(r"│ +(\d) +│ +([\d.]+) +│ +([\d.]+) +│", out)
    assert [int(layer) for layer, _, _ in rows] == list(range(6))
    assert sum(float(mlp) for _, mlp, _ in rows) / 6 == pytest.approx(figures["mlp_density"], abs=1e-3)
    assert {heads for _, _, heads in rows} == {"1.000"}
    kept = f"kept {figures['mlp_density']:.3f} of the MLP neurons (mean over all layers; layer 0 is {rows[0][1]})"
    assert kept in out and rows[0][1] == "1.000"


def test_help_says_what_density_and_threshold_are(capsys):
    with pytest.raises(SystemExit) as exit_:
        generate.main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert "Density is the share" in text and "a unit is kept when its predictor's logit lies above" in text


# ---- bad input


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--mlp-density", "0"], "(0, 1], got 0"),
        (["--mlp-density", "1.5"], "(0, 1], got 1.5"),
        (["--head-density", "nan"], "(0, 1], got nan"),
        (["--head-density", "half"], "half"),
        (["--max-new-tokens", "0"], "a whole number from 1 on, got 0"),
        (["--temperature", "0"], "a finite number above 0, got 0"),
        (["--top-p", "2"], "(0, 1], got 2"),
        (["--top-k", "-3"], "got -3"),
        (["--seed", "-1"], "Seed must be between 0"),
        (["--unknown"], "--unknown"),
        (["--prompt", ""], "empty (0 characters)"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--dense", "--mlp-density", ".5"], "--dense and --mlp-density exclude each other"),
        (["--dense", "--lookahead", "half"], "--dense and --lookahead exclude each other"),
        (["--model", "somewhere"], "no predictors for --model somewhere"),
        (["--model", "./nowhere", "--dense"], "no model at './nowhere'"),
        (["--predictors", "./nowhere"], "no folder ./nowhere"),
        (["--lookahead", "full"], "trained with lookahead 'half', 'full' was asked for"),
        (["--max-new-tokens", "2000"], "but there are 1024 positions"),
        (["--prompt", "word " * 2000], "but there are 1024 positions"),
    ],
)
def test_bad_arguments(argv, said, refused):
    assert said in refused(*argv)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b" \n\n", None])
def test_bad_prompt_files(content, refused, tmp_path):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    line = refused("--prompt-file", path)
    assert "empty" in line if content == b" \n\n" else f"{str(path)!r} cannot be read" in line


def test_binary_standard_input(refused, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert "standard input cannot be read" in refused("--prompt", "-")


def test_predictors_of_another_model(refused, other_model):
    line = refused("--model", other_model, "--predictors", bundled_model() / "predictors")
    assert "trained for 'opt-7m'" in line and "hidden_size 256 against 60" in line


@pytest.mark.parametrize("name", ["predictors.json", "predictors.safetensors"])
def test_missing_predictor_file(name, refused, predictors_copy):
    (predictors_copy / name).unlink()
    assert f"{predictors_copy / name} is missing" in refused("--predictors", predictors_copy)


@pytest.mark.parametrize("name", ["predictors.json", "predictors.safetensors"])
def test_truncated_predictor_file(name, refused, predictors_copy):
    path = predictors_copy / name
    os.truncate(path, path.stat().st_size // 2)
    line = refused("--predictors", predictors_copy)
    assert str(path) in line and "copy it again" in line


def test_training_refuses_bad_input_in_one_line(refused, tmp_path):
    def train(*argv):
        return refused("--out", tmp_path / "set", *argv, main=train_predictors.main)

    assert "give text with --data, or --data-free" in train()
    assert "cannot read nowhere.jsonl" in train("--data", "nowhere.jsonl")
    (tmp_path / "text.txt").write_text("one\n\ntwo\n")
    assert "rank must be at least 1, got 0" in train("--data", tmp_path / "text.txt", "--rank", "0")
    assert "no device 'abacus'" in train("--data", tmp_path / "text.txt", "--device", "abacus")
    assert "do not fill one window of 256" in train("--data", tmp_path / "text.txt")


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupted)
    with pytest.raises(SystemExit) as exit_:
        generate.main([])
    assert exit_.value.code == 130 and capsys.readouterr().err == "generate.py: interrupted\n"


def test_numbers_that_are_none(refused):
    assert "must be in (0, 1], got much" in refused("--mlp-density", "much")
    assert "must be a whole number from 1 on, got 1.5" in refused("--max-new-tokens", "1.5")
    assert "must be a finite number above 0, got inf" in refused("--temperature", "inf")


# ---- processes


def launch(*argv: str, text: str = "", ranks: int = 2) -> subprocess.CompletedProcess:
    """`deepspeed --num_gpus 2 launch/generate.py` with these arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deepspeed = Path(sys.executable).parent / "deepspeed"
    command = [deepspeed, "--num_gpus", str(ranks), "--master_port", str(port), "launch/generate.py", *FP32, *argv]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=180)


two_processes = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="the launcher wants a GPU for each process")


@two_processes
def test_two_processes_print_once_what_one_does(program):
    alone, _ = program("--prompt", PROMPTS[1], "--max-new-tokens", "8")
    run = launch("--prompt", "-", "--max-new-tokens", "8", "--json", text=PROMPTS[1])
    assert run.returncode == 0, run.stderr
    ours = complaints(run.stdout)
    figures = json.loads(ours[-1])
    assert list(figures) == KEYS and figures["tp"] == 2
    for key in ("prompt", "text", "new_tokens", "mlp_density", "head_density"):
        assert figures[key] == alone[key]
    assert ours[0] == PROMPTS[1] + alone["text"]
    assert sum("tokens/s" in line for line in ours) == 1


@pytest.mark.parametrize("ranks", [4, 8])
def test_case_09_four_and_eight_processes_give_the_text_of_one(ranks, program):
    """The bundled model's 8 heads over as many ranks, of which a step keeps fewer than there are."""
    if 0 < torch.cuda.device_count() < ranks:
        pytest.skip("the launcher wants a GPU for each process")
    argv = ["--prompt", PROMPTS[6], "--max-new-tokens", "12", "--head-density", "0.1"]
    alone, _ = program(*argv)
    run = launch(*argv, "--json", ranks=ranks)
    assert run.returncode == 0, run.stderr
    figures = json.loads(complaints(run.stdout)[-1])
    assert figures["tp"] == ranks and alone["head_density"] < 4 / 8
    for key in ("prompt", "text", "new_tokens"):
        assert figures[key] == alone[key]
    for key in ("mlp_density", "head_density"):
        assert figures[key] == pytest.approx(alone[key], rel=1e-3)


@two_processes
@pytest.mark.parametrize(
    ("argv", "said"),
    [(("--prompt", "-"), "the prompt is empty"), (("--predictors", "./nowhere"), "no folder ./nowhere")],
)
def test_one_of_two_processes_complains(argv, said):
    """At once, and again after the launcher has said what it ends."""
    run = launch(*argv)
    assert run.returncode != 0
    assert complaints(run.stdout) == []
    lines = complaints(run.stderr)
    assert len(lines) == 2 and lines[0] == lines[1], lines
    assert lines[0].startswith("generate.py: error: ") and said in lines[0]


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-m", "dejavu_ds.launch.generate"], [str(Path(sys.executable).parent / "dejavu-generate")]],
    ids=["module", "console script"],
)
def test_other_ways_to_start(command, tmp_path):
    run = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "usage: generate.py" in run.stdout, run.stderr


def test_python_of_the_readme_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "The king sat down and" in out and "mlp_density=" in out


@pytest.mark.parametrize("page", ["evaluation.md", "quantization.md"])
def test_python_of_the_docs_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert blocks and capsys.readouterr().out.count("Perplexity(value=") == {"evaluation.md": 3}.get(page, 0)


def test_bundled_predictors_document_themselves():
    """What the model card says of them."""
    predictors = PredictorSet.from_pretrained(bundled_model() / "predictors")
    card = (bundled_model() / "README.md").read_text(encoding="utf-8")
    assert f"lookahead `{predictors.lookahead}`" in card
    assert f"{predictors.num_parameters():,} parameters" in card
    for unit in ("mlp", "heads"):
        assert f"default {unit} density {predictors.default_density(unit)}" in card
