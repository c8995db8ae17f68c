"""Without predictors the engine is Hugging Face's model: logits, tokens, caches, dtypes."""

import copy

import pytest
import torch
from models import PROMPTS, bundled, tiny_opt
from transformers import AutoTokenizer, DynamicCache, StaticCache

import dejavu_ds
from dejavu_ds.checkpoint import bundled_model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model())


@pytest.fixture(scope="module")
def reference():
    return bundled().to("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def engine():
    return dejavu_ds.init_inference(bundled_model(), dtype=torch.float32)


def padded(tokenizer, prompts, side, device):
    tokenizer.padding_side = side
    return tokenizer(prompts, return_tensors="pt", padding=True).to(device)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_hugging_faces(prompt, engine, reference, tokenizer, device):
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    want = reference.generate(**inputs, max_new_tokens=32, do_sample=False)
    assert torch.equal(engine.generate(**inputs, max_new_tokens=32, do_sample=False), want)


@pytest.mark.parametrize("first", range(0, 20, 4))
def test_greedy_tokens_of_a_padded_batch(first, engine, reference, tokenizer, device):
    inputs = padded(tokenizer, PROMPTS[first : first + 4], "left", device)
    want = reference.generate(**inputs, max_new_tokens=32, do_sample=False)
    assert torch.equal(engine.generate(**inputs, max_new_tokens=32, do_sample=False), want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_at_every_position(side, engine, reference, tokenizer, device):
    inputs = padded(tokenizer, PROMPTS[:6], side, device)
    with torch.no_grad():
        want = reference(**inputs).logits
    real = inputs.attention_mask.bool()
    torch.testing.assert_close(engine(**inputs).logits[real], want[real], atol=1e-4, rtol=0)


def test_logits_with_explicit_positions(engine, reference, tokenizer, device):
    inputs = padded(tokenizer, PROMPTS[:4], "left", device)
    positions = (inputs.attention_mask.cumsum(1) - 1).clamp_min(0) + 5
    with torch.no_grad():
        want = reference(**inputs, position_ids=positions).logits
        plain = reference(**inputs).logits
    real = inputs.attention_mask.bool()
    assert not torch.allclose(want[real], plain[real], atol=1e-2)
    torch.testing.assert_close(engine(**inputs, position_ids=positions).logits[real], want[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [(5, 1, 1, 1, 4), (1, 11), (12,), (1,) * 12])
def test_a_cache_continued_in_chunks(chunks, device):
    ids = torch.randint(3, 131, (3, 12), device=device)
    with torch.no_grad():
        want = tiny_opt().to(device)(ids).logits
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    cache, start, got = None, 0, []
    for size in chunks:
        out = engine(input_ids=ids[:, start : start + size], past_key_values=cache)
        cache = out["cache"] if "cache" in out else out["past_key_values"]
        got.append(out.logits)
        start += size
    torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-4, rtol=1e-4)


def test_a_left_padded_cache_continued(device):
    """A step's mask may span the cache or only the new tokens; positions go on from each sequence's own."""
    ids = torch.randint(3, 131, (2, 10), device=device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        want = tiny_opt().to(device)(ids, attention_mask=mask).logits[:, 6:]
    for whole in (True, False):
        engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
        cache = engine.new_cache(2, 7)
        engine(input_ids=ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache)
        got = []
        for t in range(6, 10):
            step_mask = mask[:, : t + 1] if whole else mask[:, t : t + 1]
            step = engine(input_ids=ids[:, t : t + 1], attention_mask=step_mask, past_key_values=cache)
            got.append(step.logits)
        torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-4, rtol=1e-4)


def test_hidden_states(device):
    ids = torch.randint(3, 131, (2, 9), device=device)
    with torch.no_grad():
        want = tiny_opt().to(device)(ids, output_hidden_states=True).hidden_states
    got = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)(ids, output_hidden_states=True).hidden_states
    assert len(got) == len(want) == 4
    # Hugging Face's last entry comes after the final norm, which belongs to the head here.
    for ours, theirs in zip(got[:-1], want[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_embeddings_in_place_of_ids(device):
    ids = torch.randint(3, 131, (2, 9), device=device)
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    embeds = engine.module.get_input_embeddings()(ids)
    torch.testing.assert_close(engine(inputs_embeds=embeds).logits, engine(ids).logits)


@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_hugging_faces_own_forward_and_caches(kind, device):
    """engine.module under transformers' conventions; fails loudly when these change again."""
    ids = torch.randint(3, 131, (2, 12), device=device)
    reference = tiny_opt().to(device)
    with torch.no_grad():
        want = reference(ids).logits
    module = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32).module
    with torch.no_grad():
        if kind == "none":
            got = module(ids, use_cache=False).logits
        else:
            cache = DynamicCache(config=module.config)
            if kind == "static":
                cache = StaticCache(config=module.config, max_cache_len=20)
            first = module(ids[:, :8], past_key_values=cache, use_cache=True).logits
            rest = [module(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(8, 12)]
            got = torch.cat([first, *rest], dim=1)
            assert cache.get_seq_length() == 12
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_hugging_faces_own_generate_over_a_batch(engine, reference, tokenizer, device):
    inputs = padded(tokenizer, PROMPTS[:4], "left", device)
    want = reference.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.module.generate(**inputs, max_new_tokens=12, do_sample=False), want)


def test_a_cache_under_an_unknown_name_is_refused(device):
    module = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32).module
    hidden = torch.randn(1, 2, 60, device=device)
    with pytest.raises(TypeError, match="kv_store"):
        module.model.decoder.layers[0](hidden, kv_store=DynamicCache(config=module.config))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision(dtype, tokenizer, device):
    """As near to fp32 as Hugging Face is in the same dtype; at most twice as far."""
    inputs = tokenizer(PROMPTS[1], return_tensors="pt").to(device)
    with torch.no_grad():
        exact = bundled().to(device)(**inputs).logits
        theirs = (bundled(dtype).to(device)(**inputs).logits - exact).abs().max()
    engine = dejavu_ds.init_inference(bundled_model(), dtype=dtype)
    assert engine.dtype == dtype
    ours = (engine(**inputs).logits - exact).abs().max()
    assert 0 < ours <= 2 * theirs
    cache = engine.new_cache(1, 40)
    prompt = inputs.input_ids
    engine(input_ids=prompt[:, :-3], past_key_values=cache)
    steps = [engine(input_ids=prompt[:, [t]], past_key_values=cache).logits for t in (-3, -2, -1)]
    assert (torch.cat(steps, dim=1) - exact[:, -3:]).abs().max() <= 2 * theirs


@pytest.mark.parametrize("heads, head_dim, ffn", [(2, 32, 96), (3, 64, 130), (2, 80, 64), (1, 128, 50), (5, 7, 33)])
def test_sizes(heads, head_dim, ffn, device):
    sizes = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "ffn_dim": ffn, "num_hidden_layers": 2}
    ids = torch.randint(3, 131, (2, 11), device=device)
    with torch.no_grad():
        want = tiny_opt(**sizes).to(device)(ids).logits
    engine = dejavu_ds.init_inference(tiny_opt(**sizes), dtype=torch.float32)
    cache = engine.new_cache(2, 11)
    got = [engine(input_ids=ids[:, :8], past_key_values=cache).logits]
    got += [engine(input_ids=ids[:, t : t + 1], past_key_values=cache).logits for t in (8, 9, 10)]
    torch.testing.assert_close(torch.cat(got, dim=1), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("overrides", [{"enable_bias": False}, {"tie_word_embeddings": False}], ids=str)
def test_variants(overrides, device):
    ids = torch.randint(3, 131, (2, 11), device=device)
    model = tiny_opt(**overrides).to(device)
    with torch.no_grad():
        want = model(ids).logits
    engine = dejavu_ds.init_inference(copy.deepcopy(model), dtype=torch.float32)
    torch.testing.assert_close(engine(ids).logits, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(
        engine.generate(ids, max_new_tokens=6, do_sample=False), model.generate(ids, max_new_tokens=6, do_sample=False)
    )


def test_one_copy_of_each_weight(device):
    """Packing leaves no second copy behind, and a tied head stays tied."""
    model = tiny_opt()
    want = sum(p.numel() for p in model.parameters())
    engine = dejavu_ds.init_inference(model, dtype=torch.float32)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.module.parameters()}
    assert sum(storages.values()) == 4 * want
