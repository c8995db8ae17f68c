"""Loading over several ranks: every form of checkpoint, DeepSpeed's own parts, and no whole copy on any rank."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from models import tiny_opt
from run_loading import HUB_NAME, POST_NORM, SIZES, sparse
from test_tp import TESTS, free_port, python_path
from transformers import OPTConfig, OPTForCausalLM

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a rank needs a GPU of its own")

MODELS = {"tied": {}, "untied": {"tie_word_embeddings": False}, "350m": POST_NORM}
FORMS = {
    "safetensors": {"files": 1},
    "sharded": {"files": 3},
    "sharded base": {"files": 3, "prefix": "decoder."},
    "bin": {"files": 3, "kind": "bin"},
    "bin base": {"files": 1, "kind": "bin", "prefix": "decoder."},
}
# The last of the three ways to a head, and both prefixes, for each way to write a model down.
CASES = [(model, form) for model in MODELS for form in FORMS if model == "tied" or form in ("sharded base", "bin")]
LARGE = {"vocab_size": 2048, "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "num_hidden_layers": 20}
RANKS = 2 if 0 < torch.cuda.device_count() < 4 else 4
MIB = 2**20


def write_large(folder: Path) -> None:
    """1 GB in fp32, in files of about 100 MB; made block by block."""
    with torch.device("meta"):
        model = OPTForCausalLM(OPTConfig(**LARGE, word_embed_proj_dim=1024, max_position_embeddings=64))
    model.to_empty(device="cpu").tie_weights()
    noise = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            part = flat[start : start + noise.numel()]
            part.copy_(noise[: part.numel()])
    model.save_pretrained(folder, max_shard_size="100MB")


def put_into_hub_cache(cache: Path, folder: Path) -> None:
    """As huggingface_hub lays it out: a snapshot of links to the files, which lie elsewhere under other names."""
    root = cache / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = root / "snapshots" / ("0" * 40)
    for part in (snapshot, root / "blobs", root / "refs"):
        part.mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(root / "blobs" / str(i))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(i))


def launch(folder: Path, ranks: int, **env: str) -> None:
    beside = Path(sys.executable).parent / "deepspeed"
    launcher = [sys.executable, str(beside)] if beside.exists() else [shutil.which("deepspeed")]
    env = {**os.environ, "PYTHONPATH": python_path(), **env}
    env.pop("TRITON_INTERPRET", None)
    command = [*launcher, "--num_gpus", str(ranks), "--master_port", str(free_port())]
    command += [str(TESTS / "run_loading.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What rank 0 of two saw."""
    folder = tmp_path_factory.mktemp("loading")
    for model, form in CASES:
        write_checkpoint(folder / "small" / f"{model}, {form}", tiny_opt(**SIZES, **MODELS[model]), **FORMS[form])
    put_into_hub_cache(folder / "hub", write_checkpoint(folder / "from_hub", tiny_opt(**SIZES), files=2))
    write_checkpoint(folder / "uneven", tiny_opt(**SIZES, tie_word_embeddings=False), files=2)
    broken = tiny_opt(**SIZES)
    broken.model.decoder.layers[1].fc1.weight.data[-1, 3] = float("nan")  # in the last rank's part alone
    write_checkpoint(folder / "broken", broken)
    launch(folder, 2, HF_HUB_CACHE=str(folder / "hub"), HF_HUB_OFFLINE="1")
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.fixture(scope="module")
def memory(tmp_path_factory, request):
    """(the figures of every rank, sizes of the files of a checkpoint of a gigabyte that they have loaded)."""
    folder = tmp_path_factory.mktemp("memory")
    request.addfinalizer(lambda: shutil.rmtree(folder))  # a gigabyte, also when something fails
    write_large(folder / "large")
    launch(folder, RANKS)
    files = [path.stat().st_size for path in (folder / "large").glob("*.safetensors")]
    return [json.loads((folder / f"memory{rank}.json").read_text()) for rank in range(RANKS)], files


@pytest.mark.parametrize("model, form", CASES)
def test_case_07_every_form_is_hugging_faces_model(model, form, runs):
    got, reference = runs["small"][f"{model}, {form}"], tiny_opt(**SIZES, **MODELS[model])
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(got["logits"], reference(ids).logits, atol=3e-4, rtol=3e-4)
    assert torch.equal(got["tokens"], reference.generate(ids, max_new_tokens=8, do_sample=False))


def test_a_model_by_its_name_on_the_hub(runs):
    got, want = runs["small"][HUB_NAME], runs["small"]["tied, safetensors"]
    assert torch.equal(got["logits"], want["logits"]) and torch.equal(got["tokens"], want["tokens"])


def test_sparse_tokens_of_a_post_norm_model_do_not_depend_on_the_size(runs, tmp_path):
    alone = sparse(write_checkpoint(tmp_path / "model", tiny_opt(**SIZES, **POST_NORM)), 1)
    assert torch.equal(runs["sparse"], alone) and alone.shape == (2, 49)
    assert not torch.equal(alone[:, :17], runs["small"]["350m, bin"]["tokens"]), "it must leave something out"


def test_each_rank_reads_what_deepspeed_would_leave_it(runs):
    parts = runs["parts"]
    assert parts["None"] and parts["nf4"]
    assert sum(parts["neurons"]) == 77 and parts["neurons"][0] != parts["neurons"][1]


def test_what_one_rank_has_read_is_named_on_every_rank(runs):
    said = runs["refusals"]
    assert len(said) == 2 and said[0] == said[1]
    assert "layers.1.fc1.weight has values that are not finite in torch.float32" in said[0]


@pytest.mark.parametrize("way", ["None", "nf4", "training"])
def test_case_08_no_rank_of_four_holds_more_than_its_shard_and_a_file(way, memory):
    """An engine, packed or not, and the dense model that predictors are trained on."""
    ranks, files = memory
    assert sum(files) > 10**9 and len(files) > 5
    for rank in ranks:
        figures = rank[way]
        held = figures["held"]
        # Its share of the blocks; embeddings and norms are whole on every rank.
        assert held < ((0.16 if way == "nf4" else 1) / RANKS + 0.04) * sum(files)
        assert figures["peak"] <= held + max(files) + 1024 * MIB
        # That is the whole model to spare, so the same without the interpreter and its libraries: a block is in
        # memory twice while it is packed, and in fp32 quantising takes some 20 bytes an element of a tile.
        assert figures["peak"] - figures["before"] <= held + max(files) + 192 * MIB, figures
        assert figures["after"] - figures["before"] <= held / 2 + 64 * MIB, "an engine that is gone keeps its memory"
