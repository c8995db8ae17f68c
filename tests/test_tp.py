"""Tensor parallelism under the DeepSpeed launcher: every size gives tp 1's answer, and tp 1's is Hugging Face's."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import PROMPTS, bundled
from transformers import AutoTokenizer

from dejavu_ds.checkpoint import bundled_model

TESTS = Path(__file__).parent
# On a GPU host a rank needs a GPU of its own.
SIZES = [n for n in (1, 2, 4) if not torch.cuda.is_available() or n <= torch.cuda.device_count()]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{tp size: what run_tp.py saved}, and that nothing was compiled on the way."""
    results = {}
    beside = Path(sys.executable).parent / "deepspeed"
    launcher = str(beside) if beside.exists() else shutil.which("deepspeed")
    for size in SIZES:
        folder = tmp_path_factory.mktemp(f"tp{size}")
        out = folder / "results.pt"
        # DeepSpeed compiles into this folder if it compiles at all.
        env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "PYTHONPATH": python_path()}
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, launcher, "--num_gpus", str(size)]
        command += ["--master_port", str(free_port()), str(TESTS / "run_tp.py"), str(out)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"tp {size}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert not (folder / "extensions").exists(), "something was compiled"
        results[size] = torch.load(out, weights_only=True)
    return results


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="module")
def reference():
    tokenizer = AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")
    return bundled(), tokenizer


@pytest.mark.parametrize("size", SIZES)
def test_dense_is_hugging_face(size, runs, reference):
    model, tokenizer = reference
    dense = runs[size]["dense"]
    for prompt, tokens, logits in zip(PROMPTS, dense["tokens"], dense["logits"], strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            torch.testing.assert_close(logits, model(**inputs).logits, atol=1e-4, rtol=0)
        assert torch.equal(tokens, model.generate(**inputs, max_new_tokens=10, do_sample=False))
    batch = tokenizer(PROMPTS[:4], return_tensors="pt", padding=True)
    want = model.generate(**batch, max_new_tokens=24, do_sample=False)
    assert torch.equal(dense["batch"], want)
    assert torch.equal(dense["module"], want[:, : dense["module"].shape[1]])


@pytest.mark.parametrize("size", SIZES)
def test_ranks_agree_on_sampled_tokens(size, runs):
    assert runs[size]["dense"]["ranks_agree"]


@pytest.mark.parametrize("size", SIZES[1:])
def test_sparse_tokens_do_not_depend_on_the_size(size, runs):
    one, many = runs[1]["sparse"], runs[size]["sparse"]
    assert all(t.shape[1] > 64 for t in one["tokens"])
    for a, b in zip(one["tokens"], many["tokens"], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one["batch"], many["batch"])
    assert many["report"]["steps"] == one["report"]["steps"]
    # Sums over ranks are added in another order. A logit that lies on its threshold to the last bit may fall to either
    # side for that: a few of the run's four million choices.
    for name in ("mlp_density", "head_density"):
        assert many["report"][name] == pytest.approx(one["report"][name], rel=1e-5)
    assert one["report"]["head_density"] < 0.95 and one["report"]["mlp_density"] < 0.5


@pytest.mark.parametrize("size", SIZES)
def test_sparse_text_is_not_dense_text(size, runs):
    """Guards the test above: with heads left out the tokens must differ from the dense ones somewhere."""
    dense = [t[:, :20] for t in runs[size]["dense"]["tokens"][:10]]
    assert any(
        not torch.equal(d, s[:, : d.shape[1]]) for d, s in zip(dense, runs[size]["sparse"]["tokens"], strict=True)
    )


@pytest.mark.parametrize("size", SIZES)
def test_uneven_shards(size, runs):
    """77 neurons over the ranks, of which some get none, or as evenly as can be where DeepSpeed's grain is 1; dense is
    Hugging Face's, sparse is tp 1's."""
    result = runs[size]["uneven"]
    assert sum(result["neurons"]) == 77 and len(result["neurons"]) == size
    if size > 1:
        assert len(set(result["neurons"])) > 1
    finer = result["finer neurons"]
    assert sum(finer) == 77 and max(finer) - min(finer) <= 1 and result["finer error"] < 2e-4
    assert result["error"] < 2e-4 and result["same_tokens"]
    assert torch.equal(result["sparse"], runs[1]["uneven"]["sparse"])
    assert result["report"]["mlp_density"] == pytest.approx(runs[1]["uneven"]["report"]["mlp_density"], rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_packed_weights(size, runs):
    """Rows are whole blocks, so a shard has the bits of the whole: only sums are rounded in another order."""
    one, many = runs[1]["packed"], runs[size]["packed"]
    for a, b in zip(one["logits"], many["logits"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    for name in ("tokens", "sparse"):
        assert all(torch.equal(a, b) for a, b in zip(one[name], many[name], strict=True))
    for name in ("mlp_density", "head_density"):
        assert many["report"][name] == pytest.approx(one["report"][name], rel=1e-4)
    assert one["report"]["mlp_density"] < 0.5 and one["report"]["head_density"] < 0.95
    assert many["code_bytes"] == 6 * (4 * 256 + 2 * 1024) * 128
    torch.testing.assert_close(one["uneven"], many["uneven"], atol=2e-4, rtol=2e-4)
    # That tp 1 is Hugging Face's model with these weights is test_quantize's.
    assert not torch.allclose(many["logits"][0], runs[size]["dense"]["logits"][0], atol=0.1)
