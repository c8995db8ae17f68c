"""4-bit weights: the bits are bitsandbytes', the engine is Hugging Face's model with those weights, nothing is kept."""

import gc
import json
import sys

import pytest
import torch
from models import PROMPTS, bundled, decode_logits, tiny_opt
from quantized import quantize_in_place, round_trip
from transformers import AutoTokenizer, BitsAndBytesConfig

import dejavu_ds
from dejavu_ds import QuantizeConfig, SparsityConfig, quantize
from dejavu_ds.block import PerToken, SparseBlock
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.kernels.packed_weight import PackedWeight
from dejavu_ds.launch import evaluate, generate
from dejavu_ds.masked import masking
from dejavu_ds.packed_predictor import PackedPredictor
from dejavu_ds.predictor import Predictor, PredictorSet
from dejavu_ds.quantize import bitsandbytes_functional, pack
from dejavu_ds.text import cut_windows, token_ids

CONFIGS = [QuantizeConfig(t, size, nested) for t in ("nf4", "fp4") for size in (64, 128) for nested in (False, True)]
SIZES = {"hidden_size": 128, "ffn_dim": 77, "num_attention_heads": 4}
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")


def random_ids(B: int, S: int, device: str) -> torch.Tensor:
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(0)).to(device)


# ---- the bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_bits_are_those_of_bitsandbytes(config, dtype, device, monkeypatch):
    """Quantised a few rows at a time or at once, from a transposed view or not; whole or rows picked out."""
    monkeypatch.setattr(quantize, "_TILE_ELEMENTS", 7 * 256)
    torch.manual_seed(0)
    weight = torch.randn(256, 300).to(device, dtype).t()
    weight[3] = 0
    weight[5, ::2] *= 1e-3
    functional = bitsandbytes_functional()
    data, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=config.blocksize, quant_type=config.type, compress_statistics=config.nested
    )
    want = functional.dequantize_4bit(data, state)
    packed = pack(weight, config)
    assert packed.packed.shape == (300, 128) and torch.equal(packed.packed.flatten(), data.flatten())
    assert packed.absmax.shape == (300, 256 // config.blocksize)
    assert torch.equal(packed.absmax.flatten(), state.absmax) and torch.equal(packed.code, state.code)
    assert (packed.nested is not None) == config.nested
    assert packed.dequantize().dtype == dtype and torch.equal(packed.dequantize(), want)
    rows = torch.randperm(300, device=device)[:41].int()
    assert torch.equal(packed.rows(rows), want[rows.long()])
    assert torch.equal(packed.rows(slice(17, 230)), want[17:230])


@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_leading_dimensions_and_no_rows(config, device):
    torch.manual_seed(0)
    weight = torch.randn(2, 3, 5, 64, device=device)
    packed = pack(weight, config)
    assert packed.shape == weight.shape and packed.packed.shape == (2, 3, 5, 32)
    assert torch.equal(packed.dequantize(), round_trip(weight.flatten(0, 2), config).view(weight.shape))
    none = pack(weight[:0, 0, 0], config)
    assert none.dequantize().shape == (0, 64) and none.nbytes == 0


@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_another_dtype_for_activations_changes_no_bit(config, device):
    torch.manual_seed(0)
    packed = pack(torch.randn(20, 256, device=device), config)
    before = {name: buffer.clone() for name, buffer in packed.named_buffers()}
    packed.half()
    assert packed.dtype == torch.float16 and packed.dequantize().dtype == torch.float16
    packed.to(torch.float32)
    after = dict(packed.named_buffers())
    assert before.keys() == after.keys()
    assert all(before[name].dtype == b.dtype and torch.equal(before[name], b) for name, b in after.items())


# ---- the engine


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[6]], ids=str)
def test_dense_is_hugging_face_with_those_weights(config, tokenizer, device):
    reference = quantize_in_place(bundled().to(device), config)
    engine = dejavu_ds.init_inference(bundled_model(), quantize=config, dtype=torch.float32)
    inputs = tokenizer(PROMPTS[:5], return_tensors="pt", padding=True).to(device)
    real = inputs.attention_mask.bool()
    with torch.no_grad():
        want, plain = reference(**inputs).logits, bundled().to(device)(**inputs).logits
    assert not torch.allclose(want[real], plain[real], atol=0.1)
    torch.testing.assert_close(engine(**inputs).logits[real], want[real], **TOLERANCE)
    torch.testing.assert_close(engine.module(**inputs).logits[real], want[real], **TOLERANCE)
    options = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(engine.generate(**inputs, **options), reference.generate(**inputs, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, tokenizer, device):
    """As near to the same weights in fp32 as Hugging Face is in this dtype; at most twice as far."""
    inputs = tokenizer(PROMPTS[1], return_tensors="pt").to(device)
    theirs = quantize_in_place(bundled(dtype).to(device), CONFIGS[0])
    with torch.no_grad():
        logits = theirs(**inputs).logits
        exact = theirs.float()(**inputs).logits
    engine = dejavu_ds.init_inference(bundled_model(), quantize="nf4", dtype=dtype)
    assert engine.dtype == dtype
    allowed = 2 * (logits - exact).abs().max()
    assert 0 < (engine(**inputs).logits - exact).abs().max() <= allowed
    steps = decode_logits(engine, inputs.input_ids, inputs.input_ids.shape[1] - 3)
    assert (steps - exact[:, -4:]).abs().max() <= allowed


def test_sparse_is_the_16_bit_engine_with_those_weights(tokenizer, device):
    """Prefill, 40 steps with heads that return after short and long absences, masked and gathered."""
    sparsity = SparsityConfig(mlp_density=0.2, head_density=0.7, recovery_window=16)
    predictors = PredictorSet.from_pretrained(bundled_model() / "predictors")
    engine = dejavu_ds.init_inference(
        bundled_model(), predictors=predictors, sparsity=sparsity, quantize="nf4", dtype=torch.float32
    )
    model = quantize_in_place(bundled(), CONFIGS[0])
    reference = dejavu_ds.init_inference(model, dtype=torch.float32)
    # Attached by hand: by their fingerprint the rounded weights are another model's.
    reference.attach(reference.predictor_selectors(predictors, sparsity), sparsity)
    ids = tokenizer(" ".join(PROMPTS[:6]), return_tensors="pt").input_ids[:, :48].to(device)
    want = decode_logits(reference, ids, 8)
    torch.testing.assert_close(decode_logits(engine, ids, 8), want, atol=2e-4, rtol=0)
    ours, theirs = engine.stats.report(), reference.stats.report()
    assert ours.mlp_by_layer == theirs.mlp_by_layer and ours.heads_by_layer == theirs.heads_by_layer
    assert ours.head_density < 0.95 and ours.mlp_density < 0.5
    recovered = [int(block.attention.recovered_total) for block in engine.blocks]
    assert recovered == [int(block.attention.recovered_total) for block in reference.blocks] and any(recovered)
    masked = SparsityConfig(mlp_density=0.2, head_density=0.7, mode="masked")
    engine.attach(engine.predictor_selectors(predictors, masked), masked)
    torch.testing.assert_close(decode_logits(engine, ids, 8), want, atol=2e-4, rtol=0)


def test_sparse_at_every_position_is_hugging_face_masked(tokenizer, device):
    predictors = PredictorSet.from_pretrained(bundled_model() / "predictors")
    engine = dejavu_ds.init_inference(
        bundled_model(),
        predictors=predictors,
        sparsity=SparsityConfig(mlp_density=0.2),
        quantize="nf4",
        dtype=torch.float32,
    )
    reference = quantize_in_place(bundled(), CONFIGS[0])
    ids = tokenizer(" ".join(PROMPTS), return_tensors="pt").input_ids[:, :100]
    nets = [net.float() for net in predictors.mlp if net is not None]
    assert nets
    with torch.no_grad(), masking(reference, predictors, {"mlp": 0.2, "heads": 1.0}):
        want = reference(ids).logits
    got = engine(ids.to(device), per_token=PerToken()).logits.cpu()
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


def rounded_predictor(net: Predictor, packed: PackedPredictor) -> Predictor:
    """A predictor in fp32 with the weights that a packed one stands for."""
    w2 = packed.w2.cpu().float() * packed.w2_scale.cpu()[:, None]
    return Predictor(round_trip(net.w1.data.float(), CONFIGS[0]), net.b1.data.float(), w2, net.b2.data.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_packed_predictor(dtype, device):
    torch.manual_seed(0)
    net = Predictor.random(128, 40, 77)
    net.w2[3] = 0
    net = net.to(device, dtype)
    packed = PackedPredictor(net, CONFIGS[0])
    # Half a step of the row's 255, and what fp16 rounds.
    error = (packed.w2.float() * packed.w2_scale[:, None] - net.w2.float()).abs()
    assert (error <= (0.5 + 127 * 2**-10) * packed.w2_scale[:, None]).all() and packed.w2_scale[3] == 0
    assert packed.w2.abs().amax(1).tolist() == [0 if n == 3 else 127 for n in range(77)]
    x = torch.randn(5, 128, device=device, dtype=dtype)
    want = rounded_predictor(net.cpu(), packed).logits(x.cpu().float())
    close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(packed.logits(x).cpu(), want, atol=close, rtol=close)
    assert packed.nbytes == 40 * (64 + 2 * 4) + 77 * (40 + 4) + (40 + 77) * dtype.itemsize
    part = PackedPredictor(net.to(device).shard(30, 77), CONFIGS[0])
    assert torch.equal(part.w2, packed.w2[30:]) and torch.equal(part.w2_scale, packed.w2_scale[30:])
    assert PackedPredictor(net.to(device).shard(7, 7), CONFIGS[0]).units == 0


def test_packed_predictors_choose_by_the_weights_they_stand_for(tokenizer, device):
    sparsity = SparsityConfig(mlp_density=0.2, head_density=0.7, recovery_window=16)
    predictors = PredictorSet.from_pretrained(bundled_model() / "predictors")
    config = QuantizeConfig(predictors=True)
    shared = {"predictors": predictors, "sparsity": sparsity, "dtype": torch.float32}
    engine = dejavu_ds.init_inference(bundled_model(), quantize=config, **shared)
    reference = dejavu_ds.init_inference(bundled_model(), quantize="nf4", **shared)
    chosen = reference.predictor_selectors(predictors, sparsity)
    for selector, _ in chosen.values():
        packed = PackedPredictor(selector.predictor, config)
        selector.predictor = rounded_predictor(selector.predictor.cpu(), packed).to(device)
    reference.attach(chosen, sparsity)
    ids = tokenizer(" ".join(PROMPTS[:6]), return_tensors="pt").input_ids[:, :48].to(device)
    torch.testing.assert_close(decode_logits(engine, ids, 8), decode_logits(reference, ids, 8), atol=2e-4, rtol=0)
    ours, theirs = engine.stats.report(), reference.stats.report()
    assert ours.mlp_by_layer == theirs.mlp_by_layer and ours.heads_by_layer == theirs.heads_by_layer
    assert ours.weight_bytes_read < theirs.weight_bytes_read
    masked = SparsityConfig(mlp_density=0.2, head_density=0.7, mode="masked")
    for each in (engine, reference):
        selectors = each.predictor_selectors(predictors, masked) if each is engine else chosen
        each.attach(selectors, masked)
    want = reference(ids, per_token=PerToken()).logits
    torch.testing.assert_close(engine(ids, per_token=PerToken()).logits, want, atol=2e-4, rtol=0)


def test_no_biases_and_an_untied_head(device):
    ids = random_ids(2, 11, device)
    for overrides in ({"enable_bias": False}, {"tie_word_embeddings": False}):
        reference = quantize_in_place(tiny_opt(**SIZES, **overrides).to(device), CONFIGS[0])
        engine = dejavu_ds.init_inference(tiny_opt(**SIZES, **overrides), quantize="nf4", dtype=torch.float32)
        with torch.no_grad():
            want = reference(ids).logits
        torch.testing.assert_close(engine(ids).logits, want, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(decode_logits(engine, ids, 7), want[:, 6:], atol=2e-4, rtol=2e-4)


# ---- memory


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[2]], ids=str)
def test_bytes_that_are_held_and_read(config, device):
    """4 bits a weight and its scales; the rest in the model's dtype; and no other copy anywhere."""
    D, F, L, V, P = 128, 77, 3, 131, 402
    engine = dejavu_ds.init_inference(tiny_opt(**SIZES), quantize=config, dtype=torch.float16)
    rows = 4 * D + 2 * F
    blocks = rows * D // config.blocksize
    weights = rows * D // 2 + (blocks if config.nested else 4 * blocks)
    if config.nested:
        # A scale for 256 scales, weight by weight.
        weights += 4 * sum(-(-n * D // config.blocksize // 256) for n in (3 * D, D, F, F))
    layer = weights + 2 * (5 * D + F + 4 * D)  # biases, norms
    tables = 4 * (4 * 16 + (4 * (256 + 1) if config.nested else 0))
    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    ends = 2 * (V * D + P * D + 2 * D)
    assert sum(held.values()) == L * (layer + tables) + ends
    engine.generate(random_ids(1, 5, device), max_new_tokens=4, eos_token_id=None)
    report = engine.stats.report()
    assert report.weight_bytes_read == report.dense_weight_bytes == L * layer + 2 * V * D
    gc.collect()
    ours = {id(t) for t in tensors}
    shapes = {(4, 3, 32, D), (D, D), (3 * D, D), (F, D), (D, F)}
    everything = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in ours)
    assert not [t.shape for t in everything if t.is_floating_point() and tuple(t.shape) in shapes]


def test_a_block_is_packed_before_the_next(monkeypatch):
    """Bytes of the blocks before each is packed: 16-bit ones on the right of it, 4-bit ones on the left."""
    held, blocks, original = [], [], SparseBlock.pack

    def watched(self, *args):
        blocks.append(self)
        held.append(sum(p.nbytes for p in self.parameters()))
        original(self, *args)
        held.append(sum(t.nbytes for t in (*self.parameters(), *self.buffers())))

    monkeypatch.setattr(SparseBlock, "pack", watched)
    engine = dejavu_ds.init_inference(tiny_opt(**SIZES), quantize="nf4", dtype=torch.float32)
    assert blocks == list(engine.blocks)
    before, after = held[::2], held[1::2]
    assert len(set(before)) == len(set(after)) == 1 and after[0] < before[0] / 5


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_the_originals_memory_is_free_at_once(quantize):
    """Not when Python next collects garbage: what is packed, or stored transposed, must not be there twice."""
    model = tiny_opt(hidden_size=64, num_attention_heads=4)
    layers = model.model.decoder.layers
    copied = [w for layer in layers for w in (layer.fc2.weight, layer.self_attn.out_proj.weight)]
    packed = [w for layer in layers for w in (layer.fc1.weight, layer.self_attn.q_proj.weight)]
    dejavu_ds.init_inference(model, quantize=quantize, dtype=torch.float32)
    assert all(w.untyped_storage().nbytes() == 0 for w in copied + (packed if quantize else []))


@pytest.mark.gpu
def test_a_gpu_never_holds_the_model_in_16_bits():
    sizes = {"hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "num_hidden_layers": 12}
    model = tiny_opt(**sizes).half()
    whole, layer = (sum(p.nbytes for p in m.parameters()) for m in (model, model.model.decoder.layers[0]))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = dejavu_ds.init_inference(model, quantize="nf4", dtype=torch.float16)
    after = torch.cuda.memory_allocated() - before
    # A layer in 16 bits, query, key and value a second time on the way to the gather layout.
    assert torch.cuda.max_memory_allocated() - before < after + 1.5 * layer
    assert engine.device.type == "cuda" and after < 0.35 * whole


# ---- programs


def test_programs_take_it(tmp_path, capsys, monkeypatch, tokenizer, device):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    reference = quantize_in_place(bundled().to(device), CONFIGS[0])
    inputs = tokenizer(PROMPTS[0], return_tensors="pt").to(device)
    want = reference.generate(**inputs, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(want[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    same = ["--dense", "--dtype", "fp32", "--quantize", "nf4"]
    generate.main([*same, "--prompt", PROMPTS[0], "--max-new-tokens", "12", "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["text"] == text and figures["quantize"] == "nf4"

    data, out = tmp_path / "text.jsonl", tmp_path / "out.json"
    data.write_text(json.dumps({"text": " ".join(PROMPTS)}) + "\n")
    evaluate.main([*same, "--data", str(data), "--context", "16", "--windows", "2", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    ids = cut_windows(token_ids([" ".join(PROMPTS)], tokenizer), 16)[:2].to(device)
    with torch.no_grad():
        loss = reference(ids, labels=ids).loss
    assert row["quantize"] == "nf4" and row["value"] == pytest.approx(loss.exp().item(), rel=1e-4)


# ---- refusals


@pytest.mark.parametrize(
    "value, message",
    [
        ("int8", "nf4, fp4, or None for 16 bit; got 'int8'"),
        ({"type": "nf4", "blocksize": 96}, "blocksize must be 64 or 128, got 96"),
        ({"blocksize": 4096}, "64 or 128, got 4096"),
        ({"blocksize": "64"}, "got '64'"),
        ({"blocksize": 64.0}, r"got 64\.0"),
        ({"nested": 1}, "nested must be True or False, got 1"),
        ({"block_size": 64}, "block_size"),
        (4, "QuantizeConfig, got 4"),
        (True, "got True"),
    ],
    ids=str,
)
def test_refused_settings(value, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dejavu_ds.init_inference(tiny_opt(**SIZES), quantize=value)


def test_packed_predictors_of_a_model_that_is_not(capsys):
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--quantize-predictors"])
    assert "--quantize-predictors goes with --quantize nf4 or fp4" in capsys.readouterr().err
    with pytest.raises(TypeError, match="predictors must be True or False, got 'nf4'"):
        QuantizeConfig(predictors="nf4")


@pytest.mark.parametrize(
    "hidden, blocksize, message",
    [
        (60, 64, "rows of 60 weights are not whole blocks of 64: run this model without quantize"),
        (192, 128, "rows of 192 weights are not whole blocks of 128: use blocksize 64"),
    ],
)
def test_rows_that_are_not_whole_blocks(hidden, blocksize, message):
    model = tiny_opt(hidden_size=hidden, num_attention_heads=3)
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        dejavu_ds.init_inference(model, quantize={"blocksize": blocksize}, dtype=torch.float32)
    assert [type(m) for m in model.modules()] == before
    with pytest.raises(ValueError, match=message):
        pack(torch.zeros(4, hidden), QuantizeConfig(blocksize=blocksize))


def test_int8_activations():
    with pytest.raises(ValueError, match=r"quantize='nf4' and dtype torch.int8 exclude each other"):
        dejavu_ds.init_inference(tiny_opt(**SIZES), quantize="nf4", dtype=torch.int8)


def test_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    with pytest.raises(ValueError, match="quantize needs bitsandbytes: pip install bitsandbytes"):
        dejavu_ds.init_inference(tiny_opt(**SIZES), quantize="nf4")
    dejavu_ds.init_inference(tiny_opt(**SIZES), dtype=torch.float32)


def test_bitsandbytes_without_this_device(monkeypatch):
    def fail(*args, **kwargs):
        raise NotImplementedError("no kernel for this device\nand more")

    monkeypatch.setattr(bitsandbytes_functional(), "quantize_4bit", fail)
    with pytest.raises(ValueError, match=r"cannot quantise torch.float32 to nf4 on .* \(no kernel for this device\)"):
        dejavu_ds.init_inference(tiny_opt(**SIZES), quantize="nf4", dtype=torch.float32)


def test_models_that_are_quantised_already(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((bundled_model() / "config.json").read_text())
    settings = BitsAndBytesConfig(load_in_4bit=True)
    config["quantization_config"] = {**settings.to_dict(), "quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    loaded = tiny_opt(**SIZES)
    loaded.config.quantization_config = settings
    other = tiny_opt(**SIZES)
    other.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    for model, message in (
        (folder, "by bitsandbytes: sparse steps pick single columns of out_proj and fc2"),
        (loaded, "by bitsandbytes: sparse steps pick single columns"),
        (other, "by gptq: only weights of 16 or 32 bits"),
    ):
        for value in (None, "nf4"):
            with pytest.raises(ValueError, match=message):
                dejavu_ds.init_inference(model, quantize=value)
    bytes_ = tiny_opt(**SIZES)
    bytes_.model.decoder.layers[1].fc1.weight = torch.nn.Parameter(torch.zeros(77, 64).byte(), requires_grad=False)
    with pytest.raises(ValueError, match=r"weights of torch\.uint8"):
        dejavu_ds.init_inference(bytes_, quantize="nf4")


@pytest.mark.gpu
def test_packed_steps_as_a_graph():
    """Replayed, they give the tokens of the same steps run one by one."""
    tokens = torch.arange(2, 12, device="cuda")[None]
    generated = []
    for graph in (True, False):
        torch.manual_seed(0)
        model = tiny_opt(**SIZES).half()
        engine = dejavu_ds.init_inference(model, quantize="nf4", dtype=torch.float16, enable_cuda_graph=graph)
        generated.append(engine.generate(tokens, max_new_tokens=20, do_sample=False))
    assert torch.equal(*generated)


def test_a_packed_weight_says_what_it_is():
    shown = repr(pack(torch.zeros(3, 64), QuantizeConfig()))
    assert isinstance(pack(torch.zeros(3, 64), QuantizeConfig()), PackedWeight)
    assert shown == "PackedWeight((3, 64), blocksize=64, nested=False, dtype=torch.float32)"
