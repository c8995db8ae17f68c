"""Faults that users of systems of this kind have reported, each by the smallest input that would show it here.

The number in a name is that of the report. A test states Hugging Face's value, or a refusal that says what is wrong.
"""

import copy
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from models import PROMPTS, bundled, decode_logits, fix_selection, tiny_opt
from quantized import quantize_in_place
from run_cases import GREEDY as GREEDY_64
from run_cases import prompt, sparse_engine
from safetensors.torch import load_file
from test_lookahead import MaskedReference, random_predictors
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, OPTConfig, OPTForCausalLM, StaticCache
from triton.runtime import Autotuner

import dejavu_ds
from dejavu_ds import QuantizeConfig, SparsityConfig, kernels, plan
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.collect import Collector
from dejavu_ds.evaluate import perplexity
from dejavu_ds.kernels.ops import TORCH, TRITON
from dejavu_ds.launch import train_predictors
from dejavu_ds.quantize import pack

ROOT = Path(__file__).parents[1]
CLOSE = {"atol": 2e-4, "rtol": 2e-4}
GREEDY = {"do_sample": False, "max_new_tokens": 12}
# Several GPUs are needed to leave one out; a CPU has as many slots for the launcher as LOCAL_SIZE says.
GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")


@pytest.fixture(scope="module")
def reference():
    return bundled().to("cuda" if GPUS else "cpu")


@pytest.fixture(scope="module")
def engine():
    return dejavu_ds.init_inference(bundled_model(), dtype=torch.float32)


def dense(model, **kwargs):
    return dejavu_ds.init_inference(model, **{"dtype": torch.float32, **kwargs})


def ids_of(B, S, device, seed=0):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(seed)).to(device)


def logits_of(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


# ---- values


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("width", [60, 40])
def test_case_01_post_norm_and_projected_embeddings(width, pre_norm, device):
    sizes = {"do_layer_norm_before": pre_norm, "word_embed_proj_dim": width}
    model, ids = tiny_opt(**sizes).to(device), ids_of(2, 12, device)
    try:
        engine = dense(copy.deepcopy(model))
    except ValueError as error:
        assert not pre_norm and "post-norm" in str(error)
        return
    torch.testing.assert_close(engine(ids).logits, logits_of(model, ids), **CLOSE)
    torch.testing.assert_close(decode_logits(engine, ids, 5), logits_of(model, ids)[:, 4:], **CLOSE)
    assert torch.equal(engine.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


def test_case_02_logits_at_all_positions_and_perplexity(engine, reference, device):
    """Text that reads the same may still come from wrong logits: all positions, and their mean loss."""
    ids = torch.randint(3, 8192, (2, 300), generator=torch.Generator().manual_seed(0)).to(device)
    want = logits_of(reference, ids)
    torch.testing.assert_close(engine(ids).logits, want, atol=3e-4, rtol=0)
    loss = torch.nn.functional.cross_entropy(want[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for mode in ("dense", "decode"):
        assert perplexity(engine, ids[:, :40].cpu(), mode).value == pytest.approx(
            reference(ids[:, :40], labels=ids[:, :40]).loss.exp().item(), rel=1e-4
        )
    assert perplexity(engine, ids.cpu(), "dense").value == pytest.approx(loss.exp().item(), rel=1e-4)


def test_case_03_every_row_of_a_padded_batch(engine, tokenizer, device):
    """Left padded: each row is what the prompt gives alone. Right padded: the same logits, and no generation."""
    prompts = [PROMPTS[3], PROMPTS[11], PROMPTS[1], PROMPTS[0]]
    left = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
    assert len(set(left.attention_mask.sum(1).tolist())) > 2
    rows = engine.generate(**left, **GREEDY, eos_token_id=None)
    right = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="right").to(device)
    logits = {"left": engine(**left).logits, "right": engine(**right).logits}
    for i, text in enumerate(prompts):
        alone = tokenizer(text, return_tensors="pt").to(device)
        n = alone.input_ids.shape[1]
        want = engine.generate(**alone, **GREEDY, eos_token_id=None)
        assert torch.equal(rows[i, -12:], want[0, -12:])
        torch.testing.assert_close(logits["left"][i, -n:], engine(**alone).logits[0], **CLOSE)
        torch.testing.assert_close(logits["right"][i, :n], engine(**alone).logits[0], **CLOSE)
    with pytest.raises(ValueError, match=r"sequence \d of the batch is padded on the right .*padding_side='left'"):
        engine.generate(**right, **GREEDY)


def test_case_04_positions_given_and_counted(engine, reference, tokenizer, device):
    inputs = tokenizer(PROMPTS[:4], return_tensors="pt", padding=True).to(device)
    positions = (inputs.attention_mask.cumsum(1) - 1).clamp_min(0)
    real = inputs.attention_mask.bool()
    given, counted = engine(**inputs, position_ids=positions).logits, engine(**inputs).logits
    torch.testing.assert_close(given[real], counted[real], atol=0, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(given[real], reference(**inputs, position_ids=positions).logits[real], **CLOSE)
    want = reference.generate(**inputs, **GREEDY)
    assert torch.equal(engine.generate(**inputs, position_ids=positions, **GREEDY), want)
    assert torch.equal(engine.generate(**inputs, **GREEDY), want)


@pytest.mark.parametrize("where", ["keyword", "generation_config", "the model's own"])
def test_case_05_beams_are_refused_by_name(where, device):
    model = tiny_opt()
    options = {"keyword": {"num_beams": 3}, "generation_config": {"generation_config": GenerationConfig(num_beams=3)}}
    if where == "the model's own":
        model.generation_config.num_beams = 3
    with pytest.raises(ValueError, match="num_beams=3: beam search is not supported"):
        dense(model).generate(ids_of(1, 5, device), **options.get(where, {}))


@pytest.mark.parametrize("kind", ["none", "dynamic", "static", "tuple"])
def test_case_06_caches(kind, device):
    """The engine has its own; its module takes Hugging Face's. One of another kind is never silently left out."""
    engine, ids = dense(tiny_opt()), ids_of(2, 10, device)
    want = logits_of(tiny_opt().to(device), ids)
    config = engine.module.config
    cache = {
        "none": lambda: None,
        "dynamic": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=16),
        "tuple": lambda: tuple((torch.zeros(2, 3, 1, 20), torch.zeros(2, 3, 1, 20)) for _ in range(3)),
    }[kind]()
    if kind == "none":
        torch.testing.assert_close(engine(ids, past_key_values=None).logits, want, **CLOSE)
        assert torch.equal(
            engine.generate(ids, past_key_values=None, **GREEDY), tiny_opt().to(device).generate(ids, **GREEDY)
        )
        return
    for call in (engine, lambda *args, **kwargs: engine.generate(*args, **GREEDY, **kwargs)):
        with pytest.raises(TypeError, match=f"{type(cache).__name__} cannot hold .*engine.new_cache"):
            call(ids, past_key_values=cache)
    if kind != "tuple":  # which Hugging Face no longer takes
        with torch.no_grad():
            first = engine.module(ids[:, :6], past_key_values=cache, use_cache=True).logits
            rest = [engine.module(ids[:, [t]], past_key_values=cache, use_cache=True).logits for t in range(6, 10)]
        torch.testing.assert_close(torch.cat([first, *rest], 1), want, **CLOSE)


# ---- checkpoints and ranks


def save_with_prefix(model: OPTForCausalLM, folder: Path, prefix: str) -> None:
    """Sharded safetensors files of a model; its keys begin with `model.decoder.` or, as the first OPTs', `decoder.`."""
    (model if prefix == "model.decoder." else model.model).save_pretrained(folder, max_shard_size="60KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert all(key.startswith(prefix) or key == "lm_head.weight" for file in files for key in load_file(file))
    model.config.save_pretrained(folder)


SIZES = {"hidden_size": 64, "num_attention_heads": 4}
PREFIXES = {"causal": "model.decoder.", "base": "decoder."}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What run_cases.py saved, of two ranks started with CUDA_VISIBLE_DEVICES=0,2 where that can be."""
    if GPUS == 1:
        pytest.skip("a rank needs a GPU of its own")
    folder = tmp_path_factory.mktemp("cases")
    for name, prefix in PREFIXES.items():
        save_with_prefix(tiny_opt(**SIZES), folder / name, prefix)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    env.pop("TRITON_INTERPRET", None)
    devices = "0,1" if GPUS == 2 else "0,2"
    # Without GPUs the launcher counts sockets, or believes this.
    env |= {"CUDA_VISIBLE_DEVICES": devices, "LOCAL_SIZE": "4"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    beside = Path(sys.executable).parent / "deepspeed"
    launcher = str(beside) if beside.exists() else shutil.which("deepspeed")
    command = [sys.executable, launcher, "--master_port", port, str(ROOT / "tests" / "run_cases.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return {**torch.load(folder / "out.pt", weights_only=True), "devices": devices}


@pytest.mark.parametrize("name", PREFIXES)
def test_case_07_either_prefix_of_a_sharded_checkpoint(name, two_ranks, tmp_path, device):
    want = logits_of(tiny_opt(**SIZES), prompt())
    torch.testing.assert_close(two_ranks["logits"][name], want, **CLOSE)
    save_with_prefix(tiny_opt(**SIZES), tmp_path, PREFIXES[name])
    torch.testing.assert_close(dense(tmp_path)(prompt().to(device)).logits.cpu(), want, **CLOSE)


def test_case_09_heads_that_do_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = tiny_opt(hidden_size=48, num_attention_heads=12)
    with pytest.raises(ValueError, match=r"12 attention heads .* tp_size 8; use one of \[1, 2, 4\]"):
        dejavu_ds.init_inference(model, tensor_parallel={"tp_size": 8})


def test_case_09_a_tenth_of_the_heads_on_two_ranks(two_ranks, device):
    """8 heads in a layer, of which a step often keeps fewer than there are ranks."""
    engine = sparse_engine(head_density=0.1, dtype=torch.float32)
    assert torch.equal(two_ranks["tokens of few heads"], engine.generate(prompt().to(device), **GREEDY_64).cpu())
    report = engine.stats.report()
    assert min(report.heads_by_layer) < 2 / 8


@pytest.mark.parametrize("empty", ["a rank without heads", "no head at all", "no neuron at all"])
def test_case_09_selections_that_leave_nothing(empty, device):
    """Fewer heads than ranks: some choose none, here in every layer or in one; the sums are still right.

    Against Hugging Face with those heads or neurons at zero.
    """
    ids, start = ids_of(2, 20, device), 8
    keep = torch.tensor([False, True, False], device=device) if "rank" in empty else None
    heads = keep if keep is not None else torch.zeros(3, dtype=torch.bool, device=device)
    neurons = torch.zeros(77, dtype=torch.bool, device=device)
    engine, model = dense(tiny_opt()), tiny_opt().to(device)
    if "neuron" in empty:
        fix_selection(engine, mlp=lambda i: [neurons], window=4)
        zero_units(model, start, mlp=lambda i, t: neurons)
    else:
        fix_selection(engine, heads=lambda i: [heads], window=4)
        zero_units(model, start, heads=lambda i, t: heads)
    torch.testing.assert_close(decode_logits(engine, ids, start), logits_of(model, ids)[:, start - 1 :], **CLOSE)


def zero_units(model, start: int, heads=None, mlp=None) -> None:
    """Let Hugging Face's model zero units from position `start` on; every head has its keys and values all the same.

    heads, mlp: functions of the layer and the step that return a mask [units].
    """

    def hook_of(layer, keep, group):
        def hook(module, args):
            # fc2 may be given [B * S, F].
            x = args[0].clone().view(model.batch, -1, args[0].shape[-1])
            for t in range(start, x.shape[1]):
                x[:, t] *= keep(layer, t - start).repeat_interleave(group)
            return (x.view(args[0].shape),)

        return hook

    def remember(module, args, kwargs):
        model.batch = (args[0] if args else kwargs["input_ids"]).shape[0]

    model.register_forward_pre_hook(remember, with_kwargs=True)
    for i, layer in enumerate(model.model.decoder.layers):
        if heads is not None:
            layer.self_attn.out_proj.register_forward_pre_hook(hook_of(i, heads, layer.self_attn.head_dim))
        if mlp is not None:
            layer.fc2.register_forward_pre_hook(hook_of(i, mlp, 1))


def test_case_10_two_ranks_give_one_ranks_tokens(two_ranks, device):
    engine = sparse_engine(dtype=torch.float32)
    want = engine.generate(prompt().to(device), **GREEDY_64).cpu()
    assert torch.equal(two_ranks["tokens"], want)
    report = engine.stats.report()
    assert report.mlp_density < 0.7 and report.head_density < 0.95


def test_case_10_ranks_agree_on_drawn_tokens(two_ranks):
    assert two_ranks["agree"] == dict.fromkeys(("on the device", "on the host", "by the clock", "several"), True)


def test_ranks_agree_on_the_layer_that_gave_nan(two_ranks):
    """It begins in what one rank computes; both name the layer, and the token."""
    first, second = two_ranks["broken"]
    assert first == second and len(first) == 2
    assert all(text.startswith("layer 2 gave NaN or infinity for the token at position 12") for text in first), first


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("sparse", [False, True])
def test_case_11_bf16_everywhere(sparse, quantize, tokenizer, device):
    """At most twice as far from fp32 as Hugging Face's own bf16, with the same weights and the same kept units."""
    inputs = tokenizer(PROMPTS[1], return_tensors="pt").to(device)
    ids, start = inputs.input_ids, 6
    exact, rough = bundled().bfloat16().to(device), bundled(torch.bfloat16).to(device)
    if quantize:
        exact, rough = (quantize_in_place(model, QuantizeConfig()) for model in (exact, rough))
    exact = exact.float()
    engine = dejavu_ds.init_inference(bundled_model(), quantize=quantize, dtype=torch.bfloat16)
    masks = [torch.rand(1024, generator=torch.Generator().manual_seed(i)) < 0.5 for i in range(6)]
    if sparse:
        masks = [mask.to(device) for mask in masks]
        fix_selection(engine, mlp=lambda i: [masks[i]])
        for model in (exact, rough):
            zero_units(model, start, mlp=lambda i, t: masks[i])
    want = logits_of(exact, ids)[:, start - 1 :]
    error = (logits_of(rough, ids)[:, start - 1 :] - want).abs().max()
    ours = decode_logits(engine, ids, start)
    assert ours.dtype == torch.bfloat16
    assert 0 < (ours - want).abs().max() <= 2 * error


@pytest.mark.skipif(GPUS > 0, reason="a GPU takes it")
def test_case_12_graphs_say_why_not_on_a_cpu(two_ranks):
    with pytest.raises(ValueError, match="enable_cuda_graph=True needs a GPU, this machine has a cpu"):
        sparse_engine(enable_cuda_graph=True)
    assert "enable_cuda_graph=True needs a GPU, this machine has a cpu" in two_ranks["refusals"]["graph"]


@pytest.mark.gpu
def test_case_12_graphs_with_injection(device):
    results = [
        sparse_engine(dtype=torch.float32, enable_cuda_graph=graph).generate(prompt().to(device), **GREEDY)
        for graph in (True, False)
    ]
    assert torch.equal(*results)


def test_case_13_the_launcher_leaves_the_devices_that_are_visible(two_ranks):
    """Devices 0 and 2 of more: two ranks, each sees both, and takes the one of its own number among them."""
    devices = two_ranks["devices"]
    where = [f"cuda:{i}" if GPUS else "cpu" for i in range(2)]
    assert two_ranks["ranks"] == [(i, i, devices, where[i]) for i in range(2)]


# ---- 4 bits


def test_case_14_rows_that_are_not_whole_blocks_are_refused():
    for rows, width in ((1, 60), (3, 63), (5, 100), (64, 72)):
        with pytest.raises(ValueError, match=f"rows of {width} weights are not whole blocks of 64"):
            pack(torch.randn(rows, width), QuantizeConfig())


@pytest.mark.parametrize("ffn", [77, 3420])
def test_case_15_any_number_of_neurons(ffn, device):
    """Blocks lie along the hidden size, so a shard of 3420 neurons has no partial ones; nothing warns in fp16."""
    with pytest.raises(ValueError, match="rows of 8 weights are not whole blocks of 64"):
        dense(tiny_opt(hidden_size=8, num_attention_heads=2), quantize="nf4")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": ffn, "num_hidden_layers": 2}
    want = logits_of(quantize_in_place(tiny_opt(**sizes).to(device), QuantizeConfig()), ids_of(2, 9, device))
    got = dense(tiny_opt(**sizes), quantize="nf4")(ids_of(2, 9, device)).logits
    torch.testing.assert_close(got, want, **CLOSE)
    half = dejavu_ds.init_inference(tiny_opt(**sizes).half(), quantize="nf4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = half(ids_of(2, 9, device)).logits
        half.generate(ids_of(2, 9, device), max_new_tokens=4, do_sample=False)
    dtypes = {p.dtype for p in half.module.parameters()}
    assert dtypes == {torch.float16} and logits.dtype == torch.float16
    assert (logits - want).abs().max() < 0.05 * want.abs().max()


def test_case_16_a_checkpoint_in_4_bits_is_refused(two_ranks):
    said = two_ranks["refusals"]["quantised"]
    assert "quantised already" in said or "by bitsandbytes" in said, said
    assert "columns" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_case_25_4_bits_on_a_cpu(dtype, tokenizer):
    inputs = tokenizer(PROMPTS[:2], return_tensors="pt", padding=True)
    real = inputs.attention_mask.bool()
    want = logits_of(quantize_in_place(bundled(), QuantizeConfig()), inputs.input_ids, attention_mask=real.long())[real]
    if dtype == torch.float16:
        rough = quantize_in_place(bundled(dtype), QuantizeConfig())
        error = (logits_of(rough, inputs.input_ids, attention_mask=real.long())[real] - want).abs().max()
    engine = dejavu_ds.init_inference(bundled_model(), quantize="nf4", dtype=dtype)
    got = engine(**inputs.to(engine.device)).logits.cpu()[real]
    assert got.abs().max() > 1
    assert (got - want).abs().max() <= (2 * error if dtype == torch.float16 else 2e-4)


# ---- kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_case_17_a_step_through_every_kernel(dtype, device):
    """Interpreted here, compiled on a GPU: at most twice as far from fp32 as the torch twins are. Heads come and go,
    so keys and values are made up too. Each kernel by itself is tested in tests/kernels."""
    ids, start = ids_of(2, 8, device), 5
    masks = {
        n: [(torch.rand(n, generator=torch.Generator().manual_seed(t % 2)) < 0.5).to(device) for t in range(3)]
        for n in (3, 77)
    }
    assert not torch.equal(masks[3][0], masks[3][1]), "heads must come and go for the test to say anything"
    exact = tiny_opt(num_hidden_layers=1).to(device)
    zero_units(exact, start, heads=lambda i, t: masks[3][t], mlp=lambda i, t: masks[77][t])
    want = logits_of(exact, ids)[:, start:]
    errors = []
    for ops in (TRITON, TORCH):
        engine = dense(tiny_opt(num_hidden_layers=1), dtype=dtype)
        for block in engine.blocks:
            block.attention._ops = block.mlp._ops = ops
        fix_selection(engine, heads=lambda i: masks[3], mlp=lambda i: masks[77], window=3)
        errors.append((decode_logits(engine, ids, start)[:, 1:] - want).abs().max().item())
    floor = 16 * torch.finfo(dtype).eps * want.abs().max().item()
    assert errors[0] <= 2 * errors[1] + floor, errors


def test_case_18_no_kernel_is_tuned_while_it_runs():
    """Block sizes come from a table, so nothing is measured during a capture."""
    modules = [module for name, module in sys.modules.items() if name.startswith(kernels.__name__)]
    found = [value for module in modules for value in vars(module).values() if hasattr(value, "run")]
    assert len(found) > 5, "the kernels were not found"
    assert not any(isinstance(value, Autotuner) for value in found)


@pytest.mark.gpu
def test_case_18_the_first_generation_of_a_process(tmp_path):
    """With nothing compiled before, captured."""
    code = (
        "import torch; from run_cases import prompt, sparse_engine; e = sparse_engine(dtype=torch.float32); "
        "e.generate(prompt().to(e.device), max_new_tokens=8, eos_token_id=None); assert e.runner.uses_graphs"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


# ---- predictors


@pytest.mark.parametrize("sizes", [(24, 40, 3), (64, 256, 4), (20, 77, 1)], ids=str)
def test_case_19_collecting_from_models_of_any_width(sizes):
    hidden, ffn, heads = sizes
    config = OPTConfig(
        hidden_size=hidden, word_embed_proj_dim=hidden, ffn_dim=ffn, num_attention_heads=heads, num_hidden_layers=2,
        vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    records = Collector(model, 32).collect(ids_of(2, 16, "cpu") % 50)
    for record in records:
        shapes = [tuple(getattr(record, n).shape) for n in ("attention", "mlp", "head_outputs", "activation")]
        assert shapes == [(32, hidden), (32, hidden), (32, hidden), (32, ffn)]
    layer = model.model.decoder.layers[1]
    activation = torch.relu(layer.fc1(records[1].mlp.float()))
    torch.testing.assert_close(records[1].activation.float(), activation, rtol=2e-3, atol=2e-3)


def test_case_20_label_threshold_and_recall_are_told_apart(capsys):
    """Defined in the docs and in --help; that the trainer prints recall layer by layer is its own program's test."""
    with pytest.raises(SystemExit):
        train_predictors.main(["--help"])
    shown = capsys.readouterr().out
    docs = (ROOT / "docs" / "predictors.md").read_text(encoding="utf-8")
    for word in ("label", "threshold", "recall", "precision"):
        assert re.search(rf"^  {word} +\w", shown, re.MULTILINE), word
        assert re.search(rf"^\| {word} \| \w", docs, re.MULTILINE), word


def test_case_21_heads_that_alternate_for_40_tokens(device):
    """Against Hugging Face's model, which has every head's keys and values, with the same heads at zero."""
    ids, start = ids_of(2, 50, device), 10
    sets = [torch.tensor([True, False, True], device=device), torch.tensor([False, True, False], device=device)]
    model, engine = tiny_opt().to(device), dense(tiny_opt())
    zero_units(model, start, heads=lambda i, t: sets[(t + i) % 2])
    fix_selection(engine, heads=lambda i: [sets[(t + i) % 2] for t in range(40)], window=64)
    torch.testing.assert_close(decode_logits(engine, ids, start), logits_of(model, ids)[:, start - 1 :], **CLOSE)


@pytest.mark.parametrize("B", [2, 3, 5, 17])
def test_case_22_batches(B, device):
    """The union of what the sequences want, by their predictors on Hugging Face's activations."""
    ids, predictors = ids_of(B, 20, device, seed=1), random_predictors(tiny_opt(), "half")
    for predictor in (*predictors.mlp, *predictors.heads):
        predictor.to(device)
    for unit, density in (("mlp", 0.1), ("heads", 0.3)):
        rows = [[density] * 3, [1.0] * 3]
        predictors.budgets[unit] = {"default": density, "means": [density, 1.0], "rows": rows}
    want = MaskedReference(tiny_opt().to(device), predictors, {"mlp": 0.1, "heads": 0.3}, start=8)(ids)[:, 7:]
    engine = dense(tiny_opt(), predictors=predictors, sparsity=SparsityConfig(0.1, 0.3, recovery_window=6))
    torch.testing.assert_close(decode_logits(engine, ids, 8), want, atol=3e-4, rtol=3e-4)
    assert engine.stats.report().mlp_density < 0.95


def test_case_22_two_tokens_at_once(device):
    """Between sparse steps two tokens are run densely, over keys and values that heads had missed."""
    ids, start = ids_of(2, 20, device), 8
    idle = torch.tensor([True, False, False], device=device)
    every = torch.ones(3, dtype=torch.bool, device=device)
    model, engine = tiny_opt().to(device), dense(tiny_opt())
    together = {4, 5, 9, 10}
    zero_units(model, start, heads=lambda i, t: every if t in together else idle)
    fix_selection(engine, heads=lambda i: [idle], window=4)
    cache, got, t = engine.new_cache(2, 20), [], start
    got.append(engine(ids[:, :start], past_key_values=cache).logits)
    while t < 20:
        size = 2 if t - start in together else 1
        got.append(engine(ids[:, t : t + size], past_key_values=cache).logits)
        t += size
    torch.testing.assert_close(torch.cat(got, 1), logits_of(model, ids), **CLOSE)


def test_case_23_predictors_of_another_model_are_refused_with_both_names(tmp_path):
    sizes = {"vocab_size": 8192, "hidden_size": 256, "ffn_dim": 1024, "num_attention_heads": 8}
    for name, more, said in (
        ("opt-small", {}, "hidden_size 256 against 60"),
        ("opt-same-size", {**sizes, "num_hidden_layers": 6, "max_position_embeddings": 1024}, "the weights of"),
    ):
        tiny_opt(**more).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"trained for 'opt-7m', the model is '{name}': they differ in .*{said}"):
            dejavu_ds.init_inference(tmp_path / name, predictors=bundled_model() / "predictors")


@pytest.mark.parametrize("faster", ["dense", "sparse"])
def test_case_24_the_engine_takes_the_faster_way_and_says_so(faster, device, monkeypatch, caplog):
    """By a clock in which one of the two wins: Hugging Face's text if it is the dense way, else that of gather."""
    calls = iter(range(1000))

    def milliseconds(step, device):
        step()
        dense_way = next(calls) // (plan._WARM_UP + plan._REPEATS) == 3
        return 1.0 if dense_way == (faster == "dense") else 2.0

    monkeypatch.setattr(plan, "_milliseconds", milliseconds)
    predictors, ids = random_predictors(tiny_opt(), "half"), ids_of(2, 7, device)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    texts = {"dense": tiny_opt().to(device).generate(ids, **options)}
    texts["sparse"] = dense(tiny_opt(), predictors=predictors, sparsity=SparsityConfig(0.2, 0.4)).generate(
        ids, **options
    )
    assert not torch.equal(texts["dense"], texts["sparse"])
    auto = dense(tiny_opt(), predictors=predictors, sparsity=SparsityConfig(0.2, 0.4, mode="auto"))
    assert torch.equal(auto.generate(ids, **options), texts[faster])
    assert ("batch of 2: heads and MLP run dense" in caplog.text) == (faster == "dense")
    assert (auto.stats.report().mlp_density == 1.0) == (faster == "dense")
