"""`init_inference`: what it returns, what it leaves alone, what it refuses."""

import dataclasses
import json
import shutil

import deepspeed
import pytest
import torch
from deepspeed.inference.config import DeepSpeedInferenceConfig
from models import FixedSelector, bundled, tiny_opt
from test_lookahead import random_predictors
from transformers import GPT2Config, GPT2LMHeadModel

import dejavu_ds
from dejavu_ds import PredictorSet, SparsityConfig, checks
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.taps import Tap


def test_it_is_a_deepspeed_engine(device):
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    assert isinstance(engine, deepspeed.InferenceEngine)
    assert engine.device.type == device and engine.dtype == torch.float32 and engine.max_positions == 400


def test_from_a_folder_a_path_and_a_model(tmp_path):
    tiny_opt().save_pretrained(tmp_path)
    ids = torch.randint(3, 131, (1, 5))
    results = [
        dejavu_ds.init_inference(source, dtype=torch.float32)(ids.to(engine_device())).logits
        for source in (str(tmp_path), tmp_path, tiny_opt())
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def engine_device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def test_the_dtype_is_the_models_unless_given():
    assert dejavu_ds.init_inference(tiny_opt().bfloat16()).dtype == torch.bfloat16
    assert dejavu_ds.init_inference(bundled_model()).dtype == torch.float16
    assert dejavu_ds.init_inference(bundled_model(), dtype="fp32").dtype == torch.float32
    assert dejavu_ds.init_inference(bundled_model(), config={"dtype": "bf16"}).dtype == torch.bfloat16


def test_the_callers_config_is_not_changed(tmp_path):
    config = {"dtype": torch.float32, "tensor_parallel": {"tp_size": 1}}
    dejavu_ds.init_inference(tiny_opt(), config=config, max_out_tokens=77)
    assert config == {"dtype": torch.float32, "tensor_parallel": {"tp_size": 1}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dtype": "fp32", "max_out_tokens": 78}))
    engine = dejavu_ds.init_inference(tiny_opt(), config=str(path))
    assert engine._config.max_out_tokens == 78 and engine.dtype == torch.float32


def test_a_report_without_steps_claims_nothing(device):
    report = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32).stats.report()
    assert report.steps == 0 and report.mlp_density is None and report.share_read is None
    assert report.dense_weight_bytes > 0


def test_two_engines_in_one_process(device):
    ids = torch.randint(3, 131, (1, 6), device=device)
    first = dejavu_ds.init_inference(tiny_opt(seed=1), dtype=torch.float32)
    want = first(ids).logits
    second = dejavu_ds.init_inference(tiny_opt(seed=2), dtype=torch.float32)
    assert torch.equal(first(ids).logits, want) and not torch.equal(second(ids).logits, want)


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds", "attention_mask", "position_ids"])
def test_inputs_that_lie_elsewhere(name, device):
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    ids = torch.randint(3, 131, (1, 6), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(6)[None].to(ids)}
    if name == "inputs_embeds":
        inputs[name] = engine.module.get_input_embeddings()(inputs.pop("input_ids"))
    inputs[name] = inputs[name].to("meta")
    with pytest.raises(ValueError, match=rf"^{name} is on meta, the engine on {device}.*\.to\(engine\.device\)"):
        engine(**inputs)


def test_a_refusal_leaves_the_callers_model_alone():
    model = tiny_opt()
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError):
        dejavu_ds.init_inference(model, tensor_parallel={"tp_size": 3})
    assert [type(m) for m in model.modules()] == before


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"densty": 1}, "densty"),
        ({"quantize_weights": True}, "quantize_weights"),
        ({"injection_policy": {torch.nn.Linear: ("x",)}}, "injection_policy"),
        ({"replace_with_kernel_inject": True}, "replace_with_kernel_inject"),
        ({"kernel_inject": True}, "kernel_inject"),
        ({"checkpoint": "model.json"}, "checkpoint"),
        ({"triangular_masking": False}, "triangular_masking=False would have no effect"),
        ({"ep_size": 4}, "ep_size=4 would have no effect"),
        ({"tm": False}, "tm=False would have no effect"),
        ({"min_tokens": 5}, "min_tokens=5 would have no effect"),
        ({"replace_method": "none"}, "replace_method='none' would have no effect"),
        ({"args": {"a": 1}}, "args=.* would have no effect"),
        ({"expert_group": 1}, "expert_group=1 would have no effect"),
        ({"injection_dict": {torch.nn.Linear: ("x",)}}, "injection_dict cannot be given"),
        ({"mpu": "unit"}, "mpu cannot be given"),
        ({"tensor_parallel": {"tp_size": 1, "tp_group": 3}}, "tp_group cannot be given"),
        ({"tensor_parallel": {"mpu": "unit"}}, "mpu cannot be given"),
        ({"tensor_parallel": {"tp_size": 2, "enabled": False}}, "not enabled, but its tp_size is 2"),
        ({"tensor_parallel": {"tp_size": 1}, "tp": {"tp_size": 2}}, "tp is given twice"),
        ({"dtype": "auto"}, "dtype='auto' would give DeepSpeed's default"),
        ({"max_out_tokens": 0}, "max_out_tokens"),
        ({"dtype": torch.int8}, "int8"),
        ({"dtype": torch.float64}, "float64"),
        ({"config": {"dtype": "fp32"}, "dtype": "fp16"}, "once"),
        ({"config": 3}, "int"),
        ({"sparsity": SparsityConfig(mlp_density=0.5)}, "without predictors"),
        ({"sparsity": {"mlp_density": 0.5}}, "dict"),
        ({"tensor_parallel": {"tp_size": 2}}, r"tp_size is 2.* 1 process"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_refused_keywords(kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dejavu_ds.init_inference(tiny_opt(), **kwargs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_a_dtype_is_refused_before_a_checkpoint_is_opened(dtype, monkeypatch):
    monkeypatch.setattr(dejavu_ds.engine, "open_checkpoint", lambda *_: pytest.fail("opened"))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"dtype must be one of float32, float16, bfloat16, got {name}; .*='nf4'"):
        dejavu_ds.init_inference(bundled_model(), dtype=dtype)
    with pytest.raises(ValueError, match=rf"quantize='nf4' and dtype {dtype} exclude each other"):
        dejavu_ds.init_inference(bundled_model(), dtype=dtype, quantize="nf4")


def test_every_keyword_of_deepspeeds_is_heeded_or_refused():
    """A field that a later version brings must be looked at: none may be taken and then ignored."""
    heeded = {
        "dtype",
        "enable_cuda_graph",
        "keep_module_on_host",
        "max_out_tokens",
        "mp_size",
        "tensor_parallel",
    }
    assert DeepSpeedInferenceConfig.model_fields.keys() == heeded | checks._OURS.keys() | checks._WITHOUT_EFFECT
    # At their defaults they are taken, under either name.
    dejavu_ds.init_inference(tiny_opt(), replace_method="auto", tm=True, min_tokens=1, kernel_inject=False)


def test_a_module_kept_on_the_host(device):
    engine = dejavu_ds.init_inference(
        tiny_opt(), dtype=torch.float32, keep_module_on_host=True, enable_cuda_graph=False
    )
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        want = tiny_opt()(ids).logits
    assert engine.device.type == "cpu"
    torch.testing.assert_close(engine(ids).logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["max_out_tokens", "max_tokens"])
def test_max_out_tokens_bounds_a_sequence(name, device):
    """Prompt and continuation together, as DeepSpeed defines it; its default of 1024 is nobody's wish."""
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32, **{name: 12})
    ids, options = torch.arange(3, 10, device=device)[None], {"do_sample": False, "eos_token_id": None}
    want = tiny_opt().to(device).generate(ids, max_new_tokens=5, **options)
    assert engine.max_positions == 12 and torch.equal(engine.generate(ids, max_new_tokens=5, **options), want)
    with pytest.raises(ValueError, match=r"7 tokens \+ 6 new tokens = 13, but there are 12 positions .*max_out_tokens"):
        engine.generate(ids, max_new_tokens=6, **options)
    with pytest.raises(ValueError, match=r"position 12 .*12 positions .*max_out_tokens"):
        engine(torch.full((1, 13), 5, device=device))
    assert dejavu_ds.init_inference(tiny_opt(), **{name: 5000}).max_positions == 400
    long = tiny_opt(max_position_embeddings=1100)
    assert dejavu_ds.init_inference(long).max_positions == 1100


def test_selectors_out_of_place(device):
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)

    def selector(size=77):
        return FixedSelector([torch.ones(size, dtype=torch.bool, device=device)])

    shared = selector()
    for selectors, message in (
        ({("neurons", 1): (selector(), Tap(1, "mlp"))}, r"\('neurons', 1\): units are mlp, heads, layers 0 to 2"),
        ({("mlp", 3): (selector(), Tap(2, "mlp"))}, "layers 0 to 2"),
        ({("mlp", 1): (selector(76), Tap(1, "mlp"))}, "for 76 units, this rank has 77"),
        ({("mlp", 1): (selector(), Tap(2, "attention"))}, "comes after the unit has run"),
        ({("heads", 1): (selector(3), Tap(1, "mlp"))}, "comes after the unit has run"),
        ({("mlp", i): (shared, Tap(i, "mlp")) for i in (1, 2)}, r"also that of \('mlp', 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.attach(selectors, SparsityConfig())
    engine.attach({("mlp", 1): (shared, Tap(0, "attention"))}, SparsityConfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes it")
def test_a_graph_needs_a_gpu():
    with pytest.raises(ValueError, match="enable_cuda_graph=True needs a GPU"):
        dejavu_ds.init_inference(tiny_opt(), enable_cuda_graph=True)


def test_heads_that_do_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"3 attention heads .* tp_size 2"):
        dejavu_ds.init_inference(tiny_opt(), tensor_parallel={"tp_size": 2})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99)), r"gpt2.*supported: opt"),
        (lambda: tiny_opt(activation_function="gelu"), "gelu"),
        (lambda: "no/such/folder/at-all", "no/such/folder"),
    ],
    ids=["family", "activation", "folder"],
)
def test_models_without_a_policy(make, message):
    with pytest.raises(ValueError, match=message):
        dejavu_ds.init_inference(make())


def test_a_folder_of_another_family_is_refused_before_its_weights_are_read(tmp_path):
    GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gpt2"):
        dejavu_ds.init_inference(tmp_path)


@pytest.mark.parametrize(
    "field, value, error",
    [
        ("mlp_density", 0, ValueError),
        ("mlp_density", 1.5, ValueError),
        ("mlp_density", float("nan"), ValueError),
        ("mlp_density", "0.5", TypeError),
        ("head_density", -0.1, ValueError),
        ("head_density", True, TypeError),
        ("lookahead", "twice", ValueError),
        ("mode", "dense", ValueError),
        ("recovery_window", 0, ValueError),
        ("recovery_window", 1.5, TypeError),
    ],
)
def test_sparsity_config_names_the_wrong_value(field, value, error):
    with pytest.raises(error, match=str(value).replace(".", r"\.")):
        SparsityConfig(**{field: value})
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparsityConfig().mode = "masked"


def test_predictors_of_another_model():
    other = bundled_model() / "predictors"
    with pytest.raises(ValueError, match=r"trained for 'opt-7m'.*hidden_size 256 against 60"):
        dejavu_ds.init_inference(tiny_opt(), predictors=other)
    model = bundled()
    model.model.decoder.layers[0].fc1.weight.data.mul_(1.5)
    with pytest.raises(ValueError, match=r"fc1 .*sizes are equal"):
        dejavu_ds.init_inference(model, predictors=other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_the_bundled_predictors_fit_in_every_dtype(dtype, device):
    engine = dejavu_ds.init_inference(bundled_model(), predictors=bundled_model() / "predictors", dtype=dtype)
    ids = torch.randint(3, 8000, (1, 6), device=device)
    engine.generate(ids, max_new_tokens=4, eos_token_id=None)
    assert engine.stats.report().mlp_density < 0.6


@pytest.mark.parametrize("damage", ["folder", "json", "safetensors", "truncated"])
def test_damaged_predictor_files(damage, tmp_path):
    folder = tmp_path / "predictors"
    shutil.copytree(bundled_model() / "predictors", folder)
    weights = folder / "predictors.safetensors"
    if damage == "folder":
        shutil.rmtree(folder)
    elif damage == "json":
        (folder / "predictors.json").unlink()
    elif damage == "safetensors":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="predictors"):
        dejavu_ds.init_inference(bundled(), predictors=folder)


def test_saved_predictors_give_the_same_tokens(tmp_path, device):
    predictors = random_predictors(tiny_opt(), "half")
    predictors.save_pretrained(tmp_path, torch.float32)
    ids = torch.randint(3, 131, (1, 6), device=device)
    results = [
        dejavu_ds.init_inference(tiny_opt(), predictors=source, dtype=torch.float32).generate(ids, max_new_tokens=12)
        for source in (predictors, tmp_path, str(tmp_path), PredictorSet.from_pretrained(tmp_path))
    ]
    assert all(torch.equal(r, results[0]) for r in results)


def test_a_cache_of_another_batch_is_refused(device):
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    ids = torch.randint(3, 131, (2, 6), device=device)
    with pytest.raises(ValueError, match="3 sequences, the input 2"):
        engine(ids, past_key_values=engine.new_cache(3, 10))
    with pytest.raises(ValueError, match=r"attention_mask .*\[2, 6\].*\[2, 4\]"):
        engine(ids, attention_mask=torch.ones(2, 4, device=device))
    with pytest.raises(ValueError, match=r"position 400 .*400 positions"):
        engine(torch.ones(1, 401, dtype=torch.long, device=device))
    with pytest.raises(ValueError, match="exactly one"):
        engine()
