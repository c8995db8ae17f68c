"""The benchmark program: its rows, its bytes, its systems, what it refuses. Nothing here looks at a time."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from models import PROMPTS
from PIL import Image, ImageChops
from test_tp import python_path
from transformers import AutoTokenizer, OPTForCausalLM

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.bench import decode, systems, traffic
from dejavu_ds.bench.decode import Load
from dejavu_ds.bench.random_predictors import attach_calibrated, default_ranks, random_predictors, union_density
from dejavu_ds.bench.results import KEYS, command_line, make_row, ratios
from dejavu_ds.bench.shapes import SHAPES, parse_local_shape, parse_shape
from dejavu_ds.bench.source import Source
from dejavu_ds.bench.traffic import Limit, model_bytes, step_bytes
from dejavu_ds.bench.weights import empty_model, random_model
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.launch import benchmark
from dejavu_ds.quantize import QuantizeConfig

TINY = "hidden=64,ffn=256,heads=4,layers=2,vocab=512,positions=128"
QUICK = ["--steps", "4", "--contexts", "16", "--generate-tokens", "4"]


@pytest.fixture(autouse=True)
def quick_limit(monkeypatch):
    """The real measurement reads a quarter of a gigabyte several times."""
    monkeypatch.setattr(Limit, "measure", classmethod(lambda cls, device: cls(10.0, 20.0, 5.0)))


def run(tmp_path, *arguments: str) -> dict:
    out = tmp_path / "results.json"
    benchmark.main([*arguments, "--out", str(out)])
    return json.loads(out.read_text())


def on(device: str) -> torch.device:
    return torch.device(device)


def source(device: str, **options) -> Source:
    return Source(parse_shape(TINY), torch.float32, on(device), **options)


# Shapes and bytes


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_hugging_faces(name):
    shape = SHAPES[name]
    model = empty_model(shape, torch.float16)
    layer = model.model.decoder.layers[0]
    assert sum(p.numel() for p in layer.parameters()) == shape.block_parameters
    assert len(model.model.decoder.layers) == shape.layers
    # The published sizes name their parameters: 1.3b, 175b.
    total, named = sum(p.numel() for p in model.parameters()), name.removeprefix("opt-")
    stated = float(named[:-1]) * {"m": 1e6, "b": 1e9}[named[-1]]
    assert abs(total / stated - 1) < 0.04


def test_shapes_by_number_by_share_and_by_folder():
    shape = parse_shape("hidden=64, ffn=256, heads=4, layers=2")
    assert (shape.hidden, shape.ffn, shape.head_dim, shape.vocab, shape.positions) == (64, 256, 16, 50272, 2048)
    assert parse_local_shape("OPT-66B/4") == (SHAPES["opt-66b"], 4)
    assert parse_local_shape("opt-30b") == (SHAPES["opt-30b"], 1)
    bundled = parse_shape(str(bundled_model()))
    assert (bundled.name, bundled.hidden, bundled.heads) == ("opt-7m", 256, 8)


def test_dense_bytes_are_those_of_the_model():
    """All parameters but the rows of the embedding that no token asks for, the keys and the values."""
    shape = parse_shape(TINY)
    model = OPTForCausalLM(shape.config())
    parameters = sum(p.numel() for p in model.parameters())  # the tied embedding counts once: as the head
    positions = model.model.decoder.embed_positions.weight.numel()
    batch, context = 3, 10
    keys_and_values = batch * context * 2 * 64 * 2
    looked_up = batch * 2 * 64
    expected = 4 * (parameters - positions + looked_up + keys_and_values)
    assert step_bytes(shape, 4, batch=batch, context=context) == expected


def test_sparse_bytes_by_hand():
    """One of 4 heads, a quarter of 256 neurons, of which half are active; predictors of rank 8 and 3; two ranks."""
    neurons, heads = 128 // 4, 0.5
    layer = neurons * (64 + 1) + neurons / 2 * 64 + 64  # fc1 with bias, fc2, its bias
    layer += heads * 16 * (3 * (64 + 1) + 64) + 64  # q, k, v with bias, out, its bias
    layer += 20 * 2 * heads * 16  # keys and values
    layer += 4 * 64  # norms
    layer += 8 * 64 + 8 + 128 * 8 + 128  # neurons' predictor, half its second layer
    layer += 8 * 64 + 8 + 2 * 8 + 2  # heads', padded to 16 bytes
    expected = 2 * (2 * layer + 512 * 64 / 2 + 2 * 64 + 2 * 64)
    kept = {"mlp_density": 0.25, "head_density": 0.25, "active_share": 0.5}
    assert step_bytes(parse_shape(TINY), 2, tp=2, context=20, ranks={"mlp": 8, "heads": 3}, **kept) == expected


def test_bytes_agree_with_the_engines_own_count(device):
    """Without keys, values and embeddings, and with no head recovered, the engine counts the same weights."""
    ours, _, predictors = calibrated(device, {"mlp": 0.25, "heads": 1.0})
    report = ours.engine.stats.report()
    ranks = {"mlp": predictors.mlp[0].rank}
    counted = step_bytes(
        parse_shape(TINY), 4, context=0, batch=0, ranks=ranks, mlp_density=report.mlp_density, head_density=1.0
    )
    final_norm = 2 * 64 * 4
    assert abs(report.weight_bytes_read + final_norm - counted) <= 2
    assert report.dense_weight_bytes + final_norm == step_bytes(parse_shape(TINY), 4, context=0, batch=0)


def test_quantised_bytes():
    shape = parse_shape(TINY)
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    saved = step_bytes(shape, 2, context=8) - step_bytes(shape, 2, context=8, quantize="nf4")
    assert saved == weights * (2 - 0.5 - 4 / 64)


def test_a_model_that_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(traffic, "free_bytes", lambda device: 10**9)
    refused(
        capsys,
        ["decode", "--shape", "opt-175b"],
        r"opt-175b in float\d+ over 1 rank.* needs \d{3},\d{3},.* 1,000,000,000 are free",
    )
    assert model_bytes(SHAPES["opt-175b"], 2, tp=4) < 95e9


# Systems


def load_of(device: str, batch: int = 1, steps: int = 8) -> Load:
    return Load.make(parse_shape(TINY), batch, context=24, steps=steps, warmup=4, device=on(device))


def test_a_load_straddles_its_context(device):
    load = load_of(device, batch=2)
    assert load.prompt.shape == (2, 24 - 4 - 4) and len(load.warmup) == 4 and len(load.tokens) == 8
    before_timed = load.prompt.shape[1] + len(load.warmup)
    attended = [before_timed + 1 + i for i in range(8)]
    assert sum(attended) / 8 == 24.5  # the new token attends to itself
    assert load.capacity == attended[-1]


@torch.no_grad()
def test_every_system_gives_the_same_logits(device, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    load, logits = load_of(device, batch=2), {}
    whole = source(device)
    reference = random_model(parse_shape(TINY), torch.float32, on(device), 0.5)
    ids = torch.cat([load.prompt, torch.stack(load.warmup + load.tokens, dim=1)], dim=1)
    exact = reference(ids).logits[:, load.prompt.shape[1] :]
    for build in (
        lambda: systems.HFEager(whole.model()),
        lambda: systems.HFCompiled(whole.model(), "default"),
        lambda: systems.DeepSpeed(whole.deepspeed()),
        lambda: systems.Ours(whole.engine(), "dense"),
    ):
        system = build()
        for _ in range(2):  # a second start forgets the first
            system.start(load.prompt, load.capacity)
            logits = torch.stack([system.step(tokens).clone() for tokens in load.warmup + load.tokens], dim=1)
        torch.testing.assert_close(logits, exact, atol=2e-4, rtol=2e-4)
        new = system.generate(load.prompt, 3)
        assert new is None or new.shape == (2, load.prompt.shape[1] + 3)


def calibrated(device: str, densities: dict, batch: int = 1):
    """Our engine with random predictors, after the timed steps."""
    shape, load = parse_shape(TINY), load_of(device, batch)
    ours = systems.Ours(source(device).engine(), "sparse")
    ranks = {unit: rank for unit, rank in default_ranks(shape).items() if densities[unit] < 1}
    predictors = random_predictors(shape, ranks, torch.float32, on(device))

    def steps():
        ours.start(load.prompt, load.capacity)
        ours.engine.stats.reset()
        for tokens in load.warmup + load.tokens:
            ours.step(tokens)

    attach_calibrated(ours.engine, predictors, densities, steps)
    steps()
    return ours, load, predictors


@pytest.mark.parametrize("batch", [1, 3])
def test_random_predictors_keep_what_was_asked_for(device, batch):
    densities = {"mlp": union_density(0.1, batch), "heads": 0.5}
    ours, load, _ = calibrated(device, densities, batch)
    report = ours.engine.stats.report()
    assert report.steps == len(load.warmup) + len(load.tokens)
    assert report.mlp_density == pytest.approx(densities["mlp"], rel=0.02)
    # 12 steps of 2 layers of 4 heads: one decision is a hundredth.
    assert report.head_density == pytest.approx(0.5, abs=0.05)


def test_the_union_of_independent_sets():
    assert union_density(0.05, 1) == pytest.approx(0.05)
    sets = torch.rand(8, 200_000, generator=torch.Generator().manual_seed(0)) < 0.05
    assert union_density(0.05, 8) == pytest.approx(sets.any(0).float().mean().item(), rel=0.01)


def test_ranks_stay_within_their_share():
    for shape in SHAPES.values():
        ranks = default_ranks(shape)
        parameters = sum(r * (shape.hidden + n) for r, n in zip(ranks.values(), (shape.ffn, shape.heads), strict=True))
        assert parameters <= 0.06 * shape.block_parameters and max(ranks.values()) <= 256
    assert default_ranks(SHAPES["opt-30b"])["mlp"] == 256


def test_active_share(device):
    model = random_model(parse_shape(TINY), torch.float32, on(device), active_share=0.2)
    layer = model.model.decoder.layers[0]
    x = torch.nn.functional.layer_norm(torch.randn(1000, 64, device=device), (64,))
    assert (layer.fc1(x) > 0).float().mean().item() == pytest.approx(0.2, abs=0.03)


# The program


def test_decode(tmp_path, capsys, device):
    # On a GPU DeepSpeed would compile its kernels for minutes.
    names = ["hf-eager", "deepspeed", "dense", "sparse"] + ["deepspeed-kernels"] * (device == "cpu")
    results = run(
        tmp_path,
        *["decode", "--shape", TINY, "--dtype", "fp32", "--steps", "8", "--contexts", "24", "48"],
        *["--generate-tokens", "4", "--systems", *names, "--plot", str(tmp_path / "latency.png")],
    )
    rows = results["rows"]
    assert [tuple(row)[: len(KEYS)] for row in rows] == [KEYS] * 2 * len(names)
    assert [(row["system"], row["context"]) for row in rows] == [
        (system, context) for system in (name.removesuffix("-kernels") for name in names) for context in (24, 48)
    ]
    for row in rows:
        assert (row["benchmark"], row["shape"], row["tp"], row["batch"]) == ("decode", TINY, 1, 1)
        assert (row["dtype"], row["quantize"]) == ("float32", None)
        if row["ms_median"] is None:
            assert row["variant"] == "kernel injection" and row["error"]
            continue
        assert row["ms_p20"] <= row["ms_median"] <= row["ms_p80"] and row["steps"] == 8
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms_median"])
        assert row["gb_per_s"] == pytest.approx(row["step_bytes"] / row["ms_median"] / 1e6)
        assert row["share_of_limit"] == pytest.approx(row["gb_per_s"] / 20)
        assert row["peak_bytes"] > 0 and "generate_ms_per_token" in row
        sparse = row["system"] == "sparse"
        assert row["mlp_density"] == (pytest.approx(0.15, rel=0.05) if sparse else 1.0)
        assert row["head_density"] == (pytest.approx(0.5, abs=0.1) if sparse else 1.0)
    assert set(results["conditions"]) == {"gpu", "driver", "versions", "command", "commit"}
    assert {"torch", "transformers", "deepspeed"} <= set(results["conditions"]["versions"])
    assert "launch/benchmark.py decode --shape" in results["conditions"]["command"]
    assert str(tmp_path) not in results["conditions"]["command"]
    shown = capsys.readouterr().out
    assert "over sparse" in shown and "hf-eager" in shown
    if device == "cpu":
        assert "kernel injection), batch 1, context 24: failed: NotImplementedError" in shown
    with Image.open(tmp_path / "latency.png") as picture:
        assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10
        benchmark.main(["plot", str(tmp_path / "results.json"), "--plot", str(tmp_path / "again.png")])
        with Image.open(tmp_path / "again.png") as again:
            assert ImageChops.difference(picture.convert("RGB"), again.convert("RGB")).getbbox() is None


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "No such file"),
        ("{", "no results in .*Expecting"),
        ("[]", r'expected {"conditions": {...}, "rows": \[...\]}'),
        ('{"rows": [], "conditions": 3}', "expected"),
        ('{"rows": [{"shape": "x"}], "conditions": {"gpu": "x"}}', "its rows lack some of benchmark, shape"),
        ('{"rows": [], "conditions": {"gpu": "x"}}', "no rows of steps"),
    ],
)
def test_what_is_no_results_file_is_not_drawn(tmp_path, capsys, text, message):
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    refused(capsys, ["plot", str(file), "--plot", str(tmp_path / "x.png")], message)
    assert not (tmp_path / "x.png").exists()


def test_quantize_is_ours_alone(tmp_path):
    arguments = [
        "decode",
        "--shape",
        TINY,
        "--contexts",
        "24",
        "--steps",
        "4",
        "--generate-tokens",
        "0",
        "--dtype",
        "fp32",
    ]
    rows = run(tmp_path, *arguments, "--systems", "hf-eager", "dense", "sparse", "--quantize", "nf4")["rows"]
    assert [(row["system"], row["quantize"]) for row in rows] == [
        ("hf-eager", None),
        ("dense", "nf4"),
        ("sparse", "nf4"),
    ]
    assert all(row["ms_median"] > 0 for row in rows)
    # Half of the rows of fc2 are skipped; what is left of the linears takes 0.5625 bytes a weight in place of 4.
    shape = parse_shape(TINY)
    linears = shape.layers * (4 * shape.hidden**2 + 2 * shape.ffn * shape.hidden)
    read = linears - shape.layers * shape.ffn * shape.hidden / 2
    assert rows[0]["step_bytes"] - rows[1]["step_bytes"] == pytest.approx(4 * linears - 0.5625 * read, rel=1e-3)


@torch.no_grad()
def test_random_weights_come_block_by_block(device):
    """The engine that gets its blocks one by one holds what one over a whole random model holds, packed or not."""
    whole = source(device).engine()
    for quantize in (None, "nf4"):
        engine = source(device, quantize=QuantizeConfig.of(quantize))._block_by_block()
        head, embedding = engine.module.lm_head.weight, engine.module.get_input_embeddings().weight
        assert head.data_ptr() == embedding.data_ptr()
        for block, other in zip(engine.blocks, whole.blocks, strict=True):
            for name in ("fc1", "fc2"):
                weight, expected = getattr(block.mlp, name), getattr(other.mlp, name)
                assert weight.shape == expected.shape and weight.device == expected.device
                if quantize is None:
                    assert weight.std().item() == pytest.approx(expected.std().item(), rel=0.05)
            torch.testing.assert_close(block.mlp.b1, other.mlp.b1)
            torch.testing.assert_close(block.mlp_norm.weight, other.mlp_norm.weight)


def test_batch(tmp_path):
    arguments = ["batch", "--shape", TINY, "--dtype", "fp32", *QUICK, "--batch-sizes", "1", "3", "--mlp-density", ".1"]
    rows = run(tmp_path, *arguments, "--systems", "dense", "sparse")["rows"]
    sparse = [row for row in rows if row["system"] == "sparse"]
    assert [row["batch"] for row in sparse] == [1, 3]
    for row in sparse:
        assert row["mlp_density"] == pytest.approx(1 - 0.9 ** row["batch"], rel=0.05)
        assert row["head_density"] == 1.0 and row["asked_mlp_density"] == 0.1
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["ms_median"])


def test_a_model_with_its_own_predictors(tmp_path):
    model = str(bundled_model())
    arguments = ["--model", model, "--predictors", f"{model}/predictors", "--mlp-density", ".2", "--head-density", "1"]
    (row,) = run(tmp_path, "decode", *arguments, *QUICK, "--systems", "sparse")["rows"]
    assert (row["shape"], row["weights"]) == ("opt-7m", "checkpoint")
    assert 0 < row["mlp_density"] < 0.7 and row["head_density"] == 1.0


def _turnover_of_trained_heads(device: str) -> float:
    """Over the texts that the bundled model makes of some prompts, in decode steps of half of the heads."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    predictors = f"{bundled_model()}/predictors"
    sparsity = SparsityConfig(head_density=0.5)
    engine = dejavu_ds.init_inference(str(bundled_model()), predictors=predictors, sparsity=sparsity)
    shares = []
    for prompt in PROMPTS[:4]:
        ids = engine.generate(tokenizer(prompt, return_tensors="pt").input_ids.to(device), max_new_tokens=60)
        columns = list(ids.T.contiguous())
        load = Load(30, ids[:, :10], columns[10:20], columns[20:])
        system = decode.Sparse(engine, None)
        shares.append(system.head_turnover(load))
    return sum(shares) / len(shares)


def test_packed_and_not_in_one_run(tmp_path, monkeypatch):
    """Ratios of steps are those to the 16-bit rows; the plot has bars for both."""
    arguments = ["decode", "--shape", TINY, "--dtype", "fp32", *QUICK, "--quantize", "nf4", "--also-unpacked"]
    rows = run(tmp_path, *arguments, "--systems", "hf-eager", "dense", "sparse")["rows"]
    expected = [("hf-eager", None), ("dense", None), ("sparse", None), ("dense", "nf4"), ("sparse", "nf4")]
    assert [(row["system"], row["quantize"]) for row in rows] == expected
    assert all(row["ms_median"] > 0 for row in rows)
    last = rows[-1]["ms_median"]
    assert ratios(rows[-1], rows) == (last / rows[2]["ms_median"], last / rows[1]["ms_median"])
    labels = []

    def savefig(figure, *_, **__):
        labels.extend(figure.axes[0].get_legend_handles_labels()[1])

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    benchmark.main(["plot", str(tmp_path / "results.json"), "--plot", str(tmp_path / "x.png")])
    shown = [label.partition(", MLP")[0] for label in labels]
    assert shown == ["hf-eager", "dense", "dense, nf4", "sparse", "sparse, nf4"]


def test_heads_stay_as_long_as_trained_ones(device, tmp_path, monkeypatch):
    """The benchmark's random predictors, and trained ones on text: one kept head in ten was left out just before."""
    assert 0.05 < _turnover_of_trained_heads(device) < 0.2
    shape = "hidden=256,ffn=512,heads=32,layers=4,vocab=512,positions=128"
    arguments = ["--shape", shape, "--steps", "20", "--contexts", "40", "--systems", "sparse"]
    (row,) = run(tmp_path, "decode", *arguments)["rows"]
    assert 0.05 < row["head_turnover"] < 0.2
    monkeypatch.setattr("dejavu_ds.bench.random_predictors.HEAD_SPREAD", 0.0)
    (row,) = run(tmp_path, "decode", *arguments)["rows"]
    assert row["head_turnover"] > 0.25


def test_kernels(tmp_path):
    rows = run(
        tmp_path, "kernels", "--shape", TINY, f"{TINY}/2", "--dtype", "fp32", "--contexts", "32", "--steps", "2"
    )["rows"]
    assert all(tuple(row)[: len(KEYS)] == KEYS for row in rows)
    pairs = {"gather_up_proj", "gather_down_proj", "sparse_mlp", "gather_qkv", "out_proj", "decode_attention"}
    pairs |= {"predict_select", "add_norm"}
    for tp in (1, 2):
        of_rank = [row for row in rows if row["tp"] == tp]
        assert {row["kernel"] for row in of_rank if row["system"] == "dense"} == pairs
        assert {row["kernel"] for row in of_rank if row["system"] == "sparse"} == pairs | {"recover_kv"}
        (up,) = (row for row in of_rank if (row["kernel"], row["system"]) == ("gather_up_proj", "sparse"))
        kept = round(0.15 * 256 / tp)
        assert up["read_bytes"] == kept * (64 + 1) * 4 and up["sizes"] == f"64x{256 // tp}"
        assert up["mlp_density"] == kept / (256 / tp)
        (dense,) = (row for row in of_rank if (row["kernel"], row["system"]) == ("gather_qkv", "dense"))
        assert dense["read_bytes"] == 3 * 64 // tp * (64 + 1) * 4


def test_kernels_over_4_bit_weights(tmp_path):
    rows = run(tmp_path, "kernels", "--shape", TINY, "--quantize", "fp4", "--contexts", "32", "--steps", "2")["rows"]
    packed = [row for row in rows if row["quantize"] == "fp4"]
    assert len(rows) > len(packed) and all(tuple(row)[: len(KEYS)] == KEYS for row in packed)
    kernels = ("gather_up_proj", "gather_down_proj", "sparse_mlp")
    systems = ("sparse", "dense", "bitsandbytes")
    assert {(row["kernel"], row["system"]) for row in packed} == set(itertools.product(kernels, systems))
    a_row = 64 // 2 + 4  # half a byte a weight and a scale for 64 of them
    kept = {"sparse": round(0.15 * 256), "dense": 256, "bitsandbytes": 256}
    for row in packed:
        matrices = 2 if row["kernel"] == "sparse_mlp" else 1
        assert row["read_bytes"] == matrices * kept[row["system"]] * a_row
        assert row["mlp_density"] == kept[row["system"]] / 256 and row["ms_median"] > 0


def test_a_peer_that_fails_is_a_row(tmp_path, capsys, monkeypatch):
    def fail(self, tokens):
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(systems.HFEager, "step", fail)
    rows = run(tmp_path, "decode", "--shape", TINY, *QUICK, "--systems", "hf-eager", "dense")["rows"]
    failed, dense = rows
    assert failed["ms_median"] is None and failed["error"] == "RuntimeError: no kernel for this device"
    assert dense["ms_median"] > 0 and "error" not in dense
    assert "failed: RuntimeError: no kernel for this device" in capsys.readouterr().out
    monkeypatch.setattr(decode, "_ours", fail)
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "decode", "--shape", TINY, *QUICK, "--systems", "dense")
    assert "dense failed: RuntimeError: no kernel" in capsys.readouterr().err
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["ms_median"] is None


def test_ratios_compare_like_with_like():
    rows = [
        make_row(system=system, context=context, batch=1, tp=1, ms_median=ms)
        for system, context, ms in (("sparse", 1, 2.0), ("dense", 1, 5.0), ("hf-eager", 1, 9.0), ("dense", 2, 7.0))
    ]
    assert ratios(rows[2], rows) == (4.5, 1.8)
    assert ratios(rows[3], rows) == (None, 1.0)


def test_ratios_of_kernels_keep_16_and_4_bits_apart():
    rows = [
        make_row(benchmark="kernels", kernel="sparse_mlp", system=system, quantize=quantize, ms_median=ms)
        for system, quantize, ms in (("sparse", None, 2.0), ("sparse", "nf4", 1.0), ("bitsandbytes", "nf4", 8.0))
    ]
    assert ratios(rows[2], rows) == (8.0, None)


def test_commands_carry_no_folders():
    given = ["--local_rank=0", "tp", "--shape", "opt-30b", "--out", "/somewhere/of/mine/x.json"]
    assert command_line("launch/benchmark.py", given) == "launch/benchmark.py tp --shape opt-30b --out x.json"


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a rank needs a GPU of its own")
def test_two_ranks(tmp_path):
    """A plain call starts the launcher by itself; every rank makes its own shard."""
    out = tmp_path / "tp.json"
    program = os.path.join(os.path.dirname(os.path.dirname(__file__)), "launch", "benchmark.py")
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, program, "tp", "--num-gpus", "2", "--shape", TINY, "--dtype", "fp32", *QUICK]
    done = subprocess.run([*command, "--out", str(out)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows if "kernel" not in row] == ["deepspeed", "dense", "sparse"]
    sums = [row for row in rows if "kernel" in row]
    assert [row["system"] for row in sums] == ["dense", "deepspeed"]
    assert all(row["kernel"] == "all_reduce" and row["read_bytes"] == 64 * 4 for row in sums)
    for row in rows:
        assert row["tp"] == 2 and row["ms_median"] > 0
    (sparse,) = (row for row in rows if row["system"] == "sparse")
    assert sparse["mlp_density"] == pytest.approx(0.15, rel=0.1)
    assert sparse["head_density"] == pytest.approx(0.5, abs=0.1)
    asked = {"mlp_density": sparse["mlp_density"], "head_density": sparse["head_density"]}
    ranks = {"mlp": sparse["mlp_rank"], "heads": sparse["heads_rank"]}
    expected = step_bytes(parse_shape(TINY), 4, tp=2, context=16, ranks=ranks, active_share=0.5, **asked)
    assert sparse["step_bytes"] == expected


def refused(capsys, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, error), error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["decode", "--shape", "opt-31b"], "unknown shape 'opt-31b'; known are opt-125m, .*opt-175b"),
        (["decode", "--shape", "hidden=64,ffn=256,heads=4"], "lacks layers"),
        (["decode", "--shape", "hidden=64,ffn=x,heads=4,layers=1"], "'ffn=x'"),
        (["decode", "--shape", "hidden=65,ffn=256,heads=4,layers=1"], "65 does not divide by 4"),
        (["decode"], "one of the arguments --shape --model is required"),
        (["decode", "--model", "/nowhere"], "no model at '/nowhere'"),
        (["decode", "--shape", TINY, "--mlp-density", "1.5"], r"must be in \(0, 1\], got 1.5"),
        (["decode", "--shape", TINY, "--head-density", "0"], r"must be in \(0, 1\], got 0"),
        (["decode", "--shape", TINY, "--active-share", "1"], "must be between 0 and 1"),
        (["decode", "--shape", TINY, "--contexts", "4000"], "context 4000 is beyond the 128 positions"),
        (["decode", "--shape", TINY, "--contexts", "126"], "positions 1..128"),
        (["decode", "--shape", TINY, "--contexts", "64", "--steps", "200"], "ask for fewer --steps"),
        (["kernels", "--shape", TINY, "--contexts", "4000"], "context 4000 is beyond"),
        (["kernels", "--shape", "opt-66b/5"], "72 heads .* do not divide by 5"),
        (["decode", "--shape", TINY, "--predictors", "x"], "--predictors belong to a --model"),
        (["decode", "--shape", TINY, "--batch-sizes", "0"], "must be a whole number from 1 on"),
        (["decode", "--shape", TINY, "--systems", "vllm"], "invalid choice: 'vllm'"),
        (["decode", "--shape", TINY, "--also-unpacked"], "--also-unpacked goes with --quantize"),
        (
            ["decode", "--shape", TINY, "--systems", "hf-eager", "--quantize", "nf4", "--also-unpacked"],
            "name one of them among the --systems",
        ),
        (["tune", "--shape", TINY, "--dtype", "fp32"], "tune needs a GPU and --dtype fp16 or bf16; this is fp32 on a"),
    ],
)
def test_bad_input(capsys, arguments, message):
    refused(capsys, arguments, message)


def test_an_output_without_a_folder_is_refused_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "run_program", lambda *_: pytest.fail("ran"))
    for option in ("--out", "--plot"):
        with pytest.raises(SystemExit) as exit_:
            benchmark.main(["decode", "--shape", TINY, option, "nowhere/file.png"])
        assert exit_.value.code == 2 and "there is no folder" in capsys.readouterr().err
