"""Inputs at the edge: caches continued in unusual ways, odd masks and positions, things that are no model or no ids."""

import json

import pytest
import torch
from models import decode_logits, tiny_opt
from test_lookahead import random_predictors
from transformers import DynamicCache, GenerationConfig, OPTForSequenceClassification, OPTModel, StoppingCriteria

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.evaluate import perplexity

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def dense(model=None, **overrides):
    return dejavu_ds.init_inference(model or tiny_opt(), **{"dtype": torch.float32, **overrides})


def sparse(density=0.3, model=None, **config):
    predictors = random_predictors(tiny_opt(), "half")
    return dense(model, predictors=predictors, sparsity=SparsityConfig(density, density, **config))


def random_ids(B, S, device, seed=0):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(seed)).to(device)


def cache_of(output):
    return output["cache"] if "cache" in output else output["past_key_values"]


def logits_of(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.mark.parametrize("chunk", [3, 1])
def test_a_chunk_with_padding_on_the_right_does_not_lose_the_position(chunk, device):
    """Row 1 ends its chunk in padding, row 2 has nothing but padding in it; then all go on."""
    ids = random_ids(3, 11, device)
    mask = torch.ones_like(ids)
    mask[1, 7] = 0
    mask[2, 8 - chunk : 8] = 0
    want = logits_of(tiny_opt().to(device), ids, attention_mask=mask)[:, 8:]
    for whole in (True, False):
        engine = dense()
        cache = engine.new_cache(3, 4)
        engine(ids[:, : 8 - chunk], attention_mask=mask[:, : 8 - chunk], past_key_values=cache)
        engine(ids[:, 8 - chunk : 8], attention_mask=mask[:, 8 - chunk : 8], past_key_values=cache)
        got = [
            engine(ids[:, [t]], attention_mask=mask[:, : t + 1] if whole else None, past_key_values=cache).logits
            for t in range(8, 11)
        ]
        torch.testing.assert_close(torch.cat(got, 1), want, **CLOSE)


@pytest.mark.parametrize("new", [1, 3])
def test_a_whole_mask_hides_cached_tokens(new, device):
    """Hugging Face takes the mask of the latest call for all tokens, positions included."""
    ids = random_ids(2, 6 + new, device)
    mask = torch.ones_like(ids)
    mask[0, 2] = mask[1, 4:6] = 0
    reference, cache = tiny_opt().to(device), DynamicCache(config=tiny_opt().config)
    logits_of(reference, ids[:, :6], past_key_values=cache, use_cache=True)
    want = logits_of(reference, ids[:, 6:], attention_mask=mask, past_key_values=cache, use_cache=True)
    engine = dense()
    cache = engine.new_cache(2, 6)
    engine(ids[:, :6], past_key_values=cache)
    torch.testing.assert_close(engine(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits, want, **CLOSE)


def test_a_chat_turn_of_a_batch_whose_sequences_ended_at_different_steps(device):
    reference, engine, ids = tiny_opt().to(device), dense(), random_ids(3, 7, device)
    options = {"do_sample": False, "eos_token_id": list(range(0, 131, 7)), "pad_token_id": 1}
    first = engine.generate(ids, max_new_tokens=20, return_dict_in_generate=True, **options)
    mask = torch.ones_like(first.sequences)
    mask[:, 7:] = (first.sequences[:, 7:] != 1).long()
    assert len(set(mask.sum(1).tolist())) > 1, "the rows must end at different steps for the test to say anything"
    longer = torch.cat([first.sequences, random_ids(3, 3, device, seed=5)], 1)
    mask = torch.cat([mask, torch.ones(3, 3, dtype=mask.dtype, device=device)], 1)
    want = reference.generate(longer, attention_mask=mask, max_new_tokens=8, do_sample=False)
    cache = cache_of(first)
    assert bool(cache.live.all()), "who goes on with the cache by hand must not be left out of the union"
    got = engine.generate(longer, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, want)


@pytest.mark.parametrize("new_tokens", [3, 60])
def test_generate_enlarges_a_kept_cache(new_tokens, device):
    reference, engine, ids = tiny_opt().to(device), dense(), random_ids(2, 9, device)
    cache = engine.new_cache(2, 2)
    engine(ids[:, :6], past_key_values=cache)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    got = engine.generate(ids, past_key_values=cache, **options)
    assert torch.equal(got, reference.generate(ids, **options))


def test_a_full_cache_is_refused_by_a_bare_step(device):
    engine = dense()
    cache = engine.new_cache(1, 5)
    engine(random_ids(1, 5, device), past_key_values=cache)
    with pytest.raises(ValueError, match=r"full.* 5 tokens.*reserve"):
        engine.decode_one_token(torch.tensor([5], device=device), cache)


@pytest.mark.parametrize("window", [1, 2])
def test_a_sparse_cache_that_grows_from_one_slot(window, device):
    """Single tokens, padding among them, chunks and growth; gather against masked, which misses no key."""
    ids = random_ids(2, 40, device)
    padding = torch.tensor([[0], [1]], device=device)

    def run(mode):
        engine = sparse(mode=mode, recovery_window=window)
        cache, logits = engine.new_cache(2, 1), []
        for start, stop in [(t, t + 1) for t in range(20)] + [(20, 25)] + [(t, t + 1) for t in range(25, 40)]:
            mask = padding if start == 12 else None
            logits.append(engine(ids[:, start:stop], attention_mask=mask, past_key_values=cache).logits)
        # What stands at the padding itself is nobody's.
        return torch.cat(logits, 1)[:, 13:]

    torch.testing.assert_close(run("gather"), run("masked"), atol=3e-4, rtol=3e-4)


def test_a_cache_of_another_engine_is_refused(device):
    ids = random_ids(1, 8, device)
    engines = [dense(), sparse(), sparse(mode="masked"), sparse(recovery_window=7), dense(dtype=torch.bfloat16)]
    for i, engine in enumerate(engines):
        cache = engine.new_cache(1, 8)
        engine(ids[:, :5], past_key_values=cache)
        for j, other in enumerate(engines):
            if {i, j} <= {0, 2}:  # masked mode has every head's keys and values, as dense has
                other(ids[:, 5:], past_key_values=cache)
                cache = engine.new_cache(1, 8)
            elif i != j:
                with pytest.raises(ValueError, match="this engine"):
                    other(ids[:, 5:6], past_key_values=cache)


def test_caches_and_engines_outlive_inference_mode(device):
    ids = random_ids(1, 9, device)
    want = sparse().generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    model = tiny_opt()
    with torch.inference_mode():
        engine = sparse(model=model)
        first = engine.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert torch.equal(first.sequences, want[:, :12])
    got = engine.generate(
        first.sequences, past_key_values=cache_of(first), max_new_tokens=3, do_sample=False, eos_token_id=None
    )
    assert got.shape == want.shape
    assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None), want)


def test_a_model_made_under_inference_mode_is_refused():
    with torch.inference_mode():
        model = tiny_opt()
    with pytest.raises(ValueError, match="inference_mode"):
        dense(model)


def test_a_sequence_that_another_criterion_ends_goes_on_as_in_hugging_face(device):
    """Without an end-of-sequence token there is nothing to pad after."""

    class EndsRow0(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
            done[0] = input_ids.shape[1] >= 9
            return done

    models = [tiny_opt().to(device), tiny_opt()]
    for model in models:
        model.generation_config.eos_token_id = None
    ids, results = random_ids(2, 6, device), []
    for model in (models[0], dejavu_ds.init_inference(models[1], dtype=torch.float32)):
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 1, "stopping_criteria": [EndsRow0()]}
        results.append(model.generate(ids, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_of_several_sequences_a_prompt(rows, device):
    reference, engine, ids = tiny_opt().to(device), dense(), random_ids(2, 6, device)
    positions = torch.arange(6, device=device).expand(2, -1) + torch.tensor([[3], [8 if rows == 2 else 3]]).to(device)
    options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(0)
    want = reference.generate(ids, position_ids=positions, **options)
    torch.manual_seed(0)
    assert torch.equal(engine.generate(ids, position_ids=positions[:rows], **options), want)


def test_positions_at_padding_do_not_matter(device):
    ids = random_ids(2, 6, device)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 5000)
    want = logits_of(tiny_opt().to(device), ids, attention_mask=mask)
    got = dense()(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **CLOSE)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"input_ids": torch.ones(2, 5)}, "float32"),
        ({"input_ids": [[3, 4]]}, "list"),
        ({"input_ids": torch.ones(2, 1).long(), "position_ids": torch.zeros(2, 2).long()}, r"\[2, 1\].*\[2, 2\]"),
        ({"input_ids": torch.ones(1, 2).long(), "position_ids": torch.tensor([[-1, 0]])}, "position -1 .*0..399"),
        ({"input_ids": torch.ones(1, 2).long(), "position_ids": torch.tensor([[0, 400]])}, "position 400 .*0..399"),
        ({"inputs_embeds": torch.ones(2, 5, 61)}, r"60.*\[2, 5, 61\]"),
        ({"inputs_embeds": torch.ones(5, 60)}, r"\[5, 60\]"),
        ({"inputs_embeds": torch.ones(2, 0, 60)}, "at least one token"),
        ({"inputs_embeds": torch.ones(2, 5, 60).half()}, "float16"),
    ],
    ids=["float ids", "list", "position shape", "negative", "too far", "width", "2-d", "empty", "dtype"],
)
def test_inputs_of_a_wrong_kind(kwargs, message, device):
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        dense()(**moved)


def test_a_kept_cache_wants_the_whole_sequences(device):
    engine, ids = dense(), random_ids(1, 7, device)
    first = engine.generate(ids, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True)
    cache = cache_of(first)
    with pytest.raises(ValueError, match=r"holds 10 tokens.*input_ids of 2 tokens"):
        engine.generate(ids[:, :2], past_key_values=cache, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"holds 10 tokens.*inputs_embeds"):
        embeds = torch.zeros(1, 12, 60, device=device)
        engine.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"position_ids .*\[1, 11\].*\[1, 1\]"):
        positions = torch.tensor([[10]], device=device)
        engine.generate(first.sequences, past_key_values=cache, position_ids=positions, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"0 sequences|at least 1 sequence"):
        engine.new_cache(0, 5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"generation_config": GenerationConfig(cache_implementation="offloaded")}, "'offloaded'"),
    ],
    ids=str,
)
def test_caching_asked_for_otherwise(options, message, device):
    with pytest.raises(ValueError, match=message):
        dense().generate(random_ids(1, 5, device), max_new_tokens=3, **options)


def meta_opt():
    with torch.device("meta"):
        return type(tiny_opt())(tiny_opt().config)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: OPTModel(tiny_opt().config), "OPTModel .*AutoModelForCausalLM"),
        (lambda: OPTForSequenceClassification(tiny_opt().config), "OPTForSequenceClassification .*head"),
        (lambda: torch.nn.Linear(3, 3), "Linear"),
        (lambda: None, "NoneType"),
        (lambda: dense().module, "in an engine already"),
        (dense, "DejaVuEngine"),
        (meta_opt, "meta device"),
    ],
    ids=["no head", "classifier", "linear", "none", "injected", "engine", "meta"],
)
def test_what_is_no_plain_model(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dejavu_ds.init_inference(make(), dtype=torch.float32)


@pytest.mark.parametrize(
    "sizes, message",
    [((60, 50, 3), "50 units.*77"), ((60, 90, 3), "90 units.*77"), ((50, 77, 3), "50 inputs.*60"), (None, "calibrate")],
    ids=["few units", "many units", "width", "not calibrated"],
)
def test_predictors_that_do_not_fit_leave_the_model_alone(sizes, message):
    predictors = random_predictors(tiny_opt(), "half", **({} if sizes is None else {"sizes": sizes}))
    if sizes is None:
        predictors.mlp[1].quantiles = None
    model = tiny_opt()
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        dejavu_ds.init_inference(model, predictors=predictors, dtype=torch.float32)
    assert [type(m) for m in model.modules()] == before


def test_configurations_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        dense(config=str(tmp_path / "nowhere.json"))
    (tmp_path / "broken.json").write_text("{dtype")
    with pytest.raises(ValueError, match=r"broken\.json.*JSON"):
        dense(config=tmp_path / "broken.json")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(TypeError, match="list"):
        dense(config=tmp_path / "list.json")
    with pytest.raises(ValueError, match="mp_size"):
        dense(mp_size=1, tensor_parallel={"tp_size": 1})


def test_recovery_in_a_prefill_is_no_part_of_a_step(device):
    """Bytes are means over decode steps; a chat turn's prefill, which recovers every head, adds none."""
    engine, ids = sparse(recovery_window=64), random_ids(1, 20, device)
    decode_logits(engine, ids[:, :12], 4)
    cache = engine.new_cache(1, 20)
    engine(ids[:, :4], past_key_values=cache)
    for t in range(4, 12):
        engine(ids[:, [t]], past_key_values=cache)
    before = engine.stats.report()
    engine(ids[:, 12:], past_key_values=cache)
    assert engine.stats.report() == before


@pytest.mark.parametrize("mode, shape", [("decode", (2, 1)), ("dense", (2, 1)), ("masked", (0, 5)), ("dense", (5,))])
def test_windows_without_anything_to_predict(mode, shape):
    with pytest.raises(ValueError, match=r"windows .*\["):
        perplexity(sparse(), torch.full(shape, 7), mode)


def test_the_shortest_window_that_predicts(device):
    """Two tokens, one prediction: decode makes it by a sparse step, as masked does in one pass."""
    engine, windows = sparse(), random_ids(3, 2, device)
    masked, decode = (perplexity(engine, windows, mode) for mode in ("masked", "decode"))
    assert decode.tokens == masked.tokens == 3
    assert decode.value == pytest.approx(masked.value, rel=1e-5)
    assert decode.mlp_by_layer == pytest.approx(masked.mlp_by_layer)
