import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dejavu_ds.predictor import QUANTILE_LEVELS, Predictor, PredictorSet

D, FFN, HEADS, LAYERS = 12, 40, 4, 3


def made(units: int, rank: int, seed: int) -> Predictor:
    generator = torch.Generator().manual_seed(seed)
    predictor = Predictor.random(D, rank, units, generator)
    predictor.calibrate(predictor.logits(torch.randn(200, D, generator=generator)))
    return predictor


def fingerprint(name: str = "tiny", weight: float = 0.5) -> dict:
    config = {"model_type": "opt", "hidden_size": D, "ffn_dim": FFN}
    return {"name": name, "config": config, "weights": {"0.fc1": [weight] * 8}}


def budget() -> dict:
    rows = [[1.0, 0.1, 0.3], [1.0, 0.4, 0.6], [1.0, 1.0, 1.0]]
    return {"default": 0.2, "means": [0.2, 0.5, 1.0], "rows": rows}


def predictor_set(**changes) -> PredictorSet:
    values = {
        "lookahead": "half",
        "fingerprint": fingerprint(),
        "mlp": [None, made(FFN, 6, 1), made(FFN, 5, 2)],
        "heads": [None, made(HEADS, 3, 3), made(HEADS, 3, 4)],
        "budgets": {"mlp": budget(), "heads": budget()},
        "metadata": {"seed": 0},
    }
    return PredictorSet(**(values | changes))


@pytest.fixture
def folder(tmp_path):
    predictor_set().save_pretrained(tmp_path / "set")
    return tmp_path / "set"


@pytest.mark.parametrize("shape", [(D,), (7, D), (2, 3, D)])
def test_logits_formula(shape):
    p, x = made(FFN, 6, 0), torch.randn(shape)
    hidden = (x.double() @ p.w1.double().T + p.b1.double()).clamp(min=0)
    torch.testing.assert_close(p.logits(x).double(), hidden @ p.w2.double().T + p.b2.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("density", [0.001, 0.0107, 0.1, 0.2, 0.37, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("size", [(1000, 40), (997, 1)])
def test_threshold_keeps_the_share_asked_for(size, density):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul(0.7).exp() - 2
    p = Predictor.random(D, 3, size[1])
    p.calibrate(logits)
    kept = (logits > p.threshold(density)).float().mean().item()
    # A logit or two, and three thousandths of the density for interpolating inside a step of 2.7 %.
    assert abs(kept - density) <= 2 / logits.numel() + 0.003 * density


def test_threshold_is_exact_at_the_levels_of_the_table():
    logits = torch.arange(10000.0)
    p = Predictor.random(D, 3, 1)
    p.calibrate(logits[torch.randperm(10000)])
    for level in QUANTILE_LEVELS[1:-1]:
        assert (logits > p.threshold(level)).sum() == int(level * 10000)


def test_threshold_ends():
    p = made(FFN, 6, 0)
    assert p.threshold(1.0) == p.threshold(2) == -math.inf
    for density in (0, -0.1, math.nan):
        with pytest.raises(ValueError, match="density"):
            p.threshold(density)
    with pytest.raises(ValueError, match="calibrate"):
        Predictor.random(D, 3, 4).threshold(0.5)


def test_casting_leaves_the_thresholds_alone():
    p = made(FFN, 6, 0)
    before = p.threshold(0.123)
    p.half()
    assert p.w1.dtype == torch.float16 and p.quantiles.dtype == torch.float32
    assert p.threshold(0.123) == before


def test_no_module_that_tensor_parallelism_would_shard():
    assert [type(m) for m in made(FFN, 6, 0).modules()] == [Predictor]


def test_shards_are_rows_of_the_whole():
    p, x = made(FFN, 6, 0), torch.randn(5, D)
    shards = [p.shard(a, b) for a, b in ((0, 17), (17, 18), (18, FFN))]
    torch.testing.assert_close(torch.cat([s.logits(x) for s in shards], -1), p.logits(x))
    assert {s.threshold(0.2) for s in shards} == {p.threshold(0.2)}
    with pytest.raises(ValueError, match=r"30\.\.41 of 40"):
        p.shard(30, 41)


@pytest.mark.parametrize("rank, padded", [(1, 16), (16, 16), (17, 24)])
def test_a_padded_rank_is_the_same_net(rank, padded):
    p, x = made(FFN, rank, 0), torch.randn(5, D)
    wide = p.padded(padded)
    assert (wide.rank, wide.units) == (padded, FFN) and wide.threshold(0.2) == p.threshold(0.2)
    # The products that are added are 0; what may differ is the order of the others.
    torch.testing.assert_close(wide.logits(x), p.logits(x), rtol=1e-6, atol=1e-6)


def test_rejects_shapes():
    w1, b1, w2, b2 = torch.zeros(3, D), torch.zeros(3), torch.zeros(FFN, 3), torch.zeros(FFN)
    for tensors in ((w1, b1[:2], w2, b2), (w1, b1, w2.T, b2), (w1, b1, w2, b2[:2]), (b1, b1, w2, b2)):
        with pytest.raises(ValueError, match="expected w1"):
            Predictor(*tensors)
    with pytest.raises(ValueError, match="quantiles"):
        Predictor(w1, b1, w2, b2, torch.zeros(5))


@pytest.mark.parametrize("density", [0.01, 0.2, 0.3, 0.5, 0.77, 1.0])
def test_densities_have_the_mean_asked_for(density):
    row = predictor_set().densities("mlp", density)
    assert row[0] == 1.0
    assert sum(row[1:]) / 2 == pytest.approx(density)


def test_densities_interpolate_and_leave_layer_0_its_own():
    rows = [[0.4, 0.1, 0.3], [0.4, 0.4, 0.6], [1.0, 1.0, 1.0]]
    own = budget() | {"rows": rows}
    mlp = [made(FFN, 6, seed) for seed in range(3)]
    s = predictor_set(mlp=mlp, budgets={"mlp": own, "heads": budget()})
    assert s.densities("mlp", 0.2) == pytest.approx(rows[0])
    assert s.densities("mlp", 0.35) == pytest.approx([0.4, 0.25, 0.45])
    assert s.densities("mlp", 0.1) == pytest.approx([0.4, 0.05, 0.15])
    assert s.densities("mlp", 1.0) == [1.0] * 3
    assert predictor_set().densities("mlp", 0.5)[0] == 1.0  # no predictor: dense


@pytest.mark.parametrize("density", [0, -1, 1.01, math.nan])
def test_densities_rejects(density):
    with pytest.raises(ValueError, match="density of heads"):
        predictor_set().densities("heads", density)


def test_numbers():
    s = predictor_set()
    mlp = 6 * D + 6 + 6 * FFN + FFN + 5 * D + 5 + 5 * FFN + FFN
    heads = 2 * (3 * D + 3 + 3 * HEADS + HEADS)
    assert (s.num_parameters("mlp"), s.num_parameters("heads"), s.num_parameters()) == (mlp, heads, mlp + heads)
    assert s.default_density("mlp") == 0.2 and s.num_layers == LAYERS
    with pytest.raises(ValueError, match="neurons"):
        s.default_density("neurons")


def test_check():
    s = predictor_set()
    s.check(fingerprint("renamed", 0.501), LAYERS, "half")
    s.check(fingerprint(), LAYERS, None)
    with pytest.raises(ValueError, match=r"'tiny'.*'other'"):
        s.check(fingerprint("other", 0.6), LAYERS, "half")
    with pytest.raises(ValueError, match=r"'half', 'full' was asked.*--lookahead full"):
        s.check(fingerprint(), LAYERS, "full")
    with pytest.raises(ValueError, match="3 layers, the model has 4"):
        s.check(fingerprint(), 4, "half")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lookahead": "twice"}, "twice"),
        ({"heads": [None]}, "3 mlp and 1 heads"),
        ({"budgets": {"mlp": budget()}}, "heads"),
        ({"budgets": {"mlp": budget(), "heads": budget() | {"means": [0.5, 0.2, 1.0]}}}, "ascend"),
        ({"budgets": {"mlp": budget(), "heads": budget() | {"rows": [[1.0]] * 3}}}, "3 rows of 3"),
        ({"budgets": {"mlp": budget(), "heads": budget() | {"default": 0.0}}}, r"\(0, 1\]"),
    ],
)
def test_set_rejects(change, message):
    with pytest.raises(ValueError, match=message):
        predictor_set(**change)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_round_trip(tmp_path, dtype):
    s = predictor_set()
    s.save_pretrained(tmp_path / "deep" / "set", dtype)
    loaded = PredictorSet.from_pretrained(tmp_path / "deep" / "set")
    for name in ("lookahead", "fingerprint", "budgets", "metadata"):
        assert getattr(loaded, name) == getattr(s, name)
    for unit in ("mlp", "heads"):
        assert loaded.of(unit)[0] is None
        for ours, theirs in zip(s.of(unit)[1:], loaded.of(unit)[1:], strict=True):
            assert torch.equal(ours.quantiles, theirs.quantiles)
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert b.dtype == dtype and torch.equal(a.to(dtype), b)


def test_save_rejects(tmp_path):
    s = predictor_set()
    s.mlp[1].w2.data[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"mlp\.1\.w2 \(torch\.float16\).*wider"):
        s.save_pretrained(tmp_path)
    s = predictor_set(mlp=[None, Predictor.random(D, 2, FFN), None])
    with pytest.raises(ValueError, match="mlp predictor of layer 1 is not calibrated"):
        s.save_pretrained(tmp_path)


def test_missing_files(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"nowhere.*launch/train_predictors\.py"):
        PredictorSet.from_pretrained(tmp_path / "nowhere")
    (folder / "predictors.safetensors").unlink()
    with pytest.raises(ValueError, match=r"predictors\.safetensors is missing.*launch/train_predictors\.py"):
        PredictorSet.from_pretrained(folder)
    (folder / "predictors.json").unlink()
    with pytest.raises(ValueError, match=r"predictors\.json is missing.*launch/train_predictors\.py"):
        PredictorSet.from_pretrained(folder)
    (folder / "training-0.safetensors").touch()
    with pytest.raises(ValueError, match="holds a training that has not ended"):
        PredictorSet.from_pretrained(folder)


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "a/b/c", "/a/b"])
def test_paths_do_not_reach_for_the_hub(name, monkeypatch):
    monkeypatch.setattr("dejavu_ds.storage.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="no folder"):
        PredictorSet.from_pretrained(name)


def test_hub(folder, monkeypatch):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("dejavu_ds.storage.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"no network.*pass a folder"):
        PredictorSet.from_pretrained("org/name")
    monkeypatch.setattr("dejavu_ds.storage.snapshot_download", lambda *_, **__: str(folder))
    assert PredictorSet.from_pretrained("org/name").num_layers == LAYERS


def test_push_to_hub(folder, monkeypatch):
    """huggingface_hub's mixin uploads the two files, and from there they are the same set."""
    uploaded = {}

    class Api:
        def __init__(self, token=None):
            assert token == "secret"

        def create_repo(self, repo_id, private, exist_ok):
            assert private and exist_ok
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, repo_id, folder_path, **_):
            uploaded.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
            return f"address of {repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    predictors = PredictorSet.from_pretrained(folder)
    assert predictors.push_to_hub("org/name", private=True, token="secret") == "address of org/name"
    assert uploaded == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_truncated_weights(folder):
    path = folder / "predictors.safetensors"
    content = path.read_bytes()
    for size in (0, 4, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"predictors\.safetensors is truncated or corrupt"):
            PredictorSet.from_pretrained(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("mlp.1.w2"), r"mlp\.1\.w2 is missing"),
        (lambda t: t.update({"mlp.0.w1": torch.zeros(1)}), r"unexpected.*mlp\.0\.w1"),
        (lambda t: t.update({"heads.2.b2": torch.zeros(5)}), r"heads\.2\.b2 has shape \(5,\), expected \(4,\)"),
        (lambda t: t["mlp.2.b1"].fill_(float("nan")), r"not finite in mlp\.2\.b1"),
        (lambda t: t["heads.1.quantiles"].copy_(t["heads.1.quantiles"].flip(0)), r"heads\.1\.quantiles ascend"),
    ],
)
def test_wrong_tensors(folder, edit, message):
    tensors = load_file(folder / "predictors.safetensors")
    edit(tensors)
    save_file(tensors, folder / "predictors.safetensors")
    with pytest.raises(ValueError, match=message):
        PredictorSet.from_pretrained(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(format="other"), "not of predictors"),
        (lambda c: c.update(version=99), "version 99, this program reads 1"),
        (lambda c: c.pop("budgets"), "budgets"),
        (lambda c: c.update(metadata=[]), "metadata"),
        (lambda c: c.update(lookahead="back"), "back"),
        (lambda c: c["predictors"].update(mlp=[None, {"rank": 6}, None]), "garbled"),
        (lambda c: c["budgets"]["mlp"].update(means="high"), "budgets|garbled"),
        (lambda c: c["fingerprint"].pop("config"), "garbled"),
    ],
)
def test_wrong_json(folder, edit, message):
    path = folder / "predictors.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        PredictorSet.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_json_that_is_not_ours(folder, content):
    (folder / "predictors.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"predictors\.json is not"):
        PredictorSet.from_pretrained(folder)
