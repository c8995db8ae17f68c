"""Any combination of settings and inputs either generates the right number of valid tokens or is refused in words.

A refusal is an error that somebody raised on purpose, in this package or in what transformers checks before it
generates; a shape, an index or an attribute that fails deep inside is a bug, and so is a result of another shape.
"""

import linecache
import traceback
from functools import cache

import pydantic
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import tiny_opt
from test_lookahead import random_predictors
from transformers import DynamicCache

import dejavu_ds
from dejavu_ds import SparsityConfig

VOCAB, POSITIONS = 131, 40
SIZES = {"max_position_embeddings": POSITIONS, "num_hidden_layers": 3}
NAN, INF = float("nan"), float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.filterwarnings("ignore")


def examples(number: int) -> settings:
    """So many of them, the same in every run; with --hypothesis-profile=long more, and other ones each time."""
    asked = settings.get_profile(settings.get_current_profile_name())
    if settings.get_current_profile_name() == "long":
        return asked
    return settings(deadline=None, derandomize=True, max_examples=number, suppress_health_check=list(HealthCheck))


def check_refusal(error: Exception) -> None:
    """Fails for an error that nobody meant."""
    if isinstance(error, pydantic.ValidationError):
        return  # DeepSpeed's configuration names the field
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno).strip()
    told = isinstance(error, ValueError | TypeError) and line.startswith("raise ") and len(str(error)) > 10
    places = ("dejavu_ds", "injection_policies", "kernels", "launch", "transformers")
    ours = any(f"/{place}/" in frame.filename for place in places)
    if not (told and ours):
        raise AssertionError(f"{type(error).__name__} at {frame.filename}:{frame.lineno}: {error}") from error


def sometimes(usual, *odd):
    """Mostly the usual values, now and then an odd one; None leaves a keyword out."""
    return st.one_of(*[usual] * 5, st.sampled_from(odd)) if odd else usual


def any_of(*values):
    return st.sampled_from(values)


# ---- inputs


@cache
def engine_of(kind: str):
    """One for all examples: what one leaves behind must not harm the next."""
    kwargs = {"dtype": torch.bfloat16 if kind == "bf16" else torch.float32}
    model = tiny_opt(**SIZES)
    if kind != "dense":
        mode = kind if kind in ("masked", "auto") else "gather"
        kwargs["predictors"] = random_predictors(model, "half")
        kwargs["sparsity"] = SparsityConfig(0.5, 0.5, mode=mode, recovery_window=3)
    return dejavu_ds.init_inference(model, **kwargs)


USUAL = {
    "max_new_tokens": [1, 2, 6],
    "do_sample": [False, True],
    "temperature": [0.7, 1.0],
    "top_k": [1, 5, 1000],
    "top_p": [0.5, 1.0],
    "min_p": [0.1],
    "typical_p": [0.9],
    "repetition_penalty": [1.3],
    "no_repeat_ngram_size": [2],
    "min_new_tokens": [3],
    "suppress_tokens": [[3, 4]],
    "bad_words_ids": [[[5], [6, 7]]],
    "eos_token_id": [2, list(range(0, VOCAB, 4))],
    "pad_token_id": [1],
    "return_dict_in_generate": [True],
    "output_scores": [True],
    "output_logits": [True],
    "max_time": [100.0, 0.0],
    "use_cache": [True],
}
ODD = {
    "max_new_tokens": [-1, 0, POSITIONS, 2.5, "many"],
    "temperature": [0.0, -1.0, 1e-40, 1e40, NAN, INF, "hot"],
    "top_k": [0, -1, 2.5],
    "top_p": [0.0, 2.0, -0.5, NAN],
    "min_p": [-1.0, 2.0],
    "typical_p": [0.0],
    "repetition_penalty": [0.0, -1.0, NAN, INF],
    "no_repeat_ngram_size": [-1],
    "min_new_tokens": [50, -1],
    "suppress_tokens": [list(range(VOCAB)), [500], [-500]],
    "bad_words_ids": [[], [[]], [[900]], [5]],
    "eos_token_id": [500, -1, []],
    "pad_token_id": [500, -1],
    "num_beams": [0, 1, 2],
    "num_return_sequences": [0, -1, 1, 2],
    "use_cache": [False],
    "stop_strings": [["a"]],
    "penalty_alpha": [0.6],
    "guidance_scale": [1.5],
    "cache_implementation": ["static", "nothing"],
    "logits_to_keep": [1],
    "no_such_option": [1],
}


@st.composite
def some_options(draw):
    """Usual keywords of `generate`, and now and then an odd one."""
    usual = {name: st.sampled_from(values) for name, values in USUAL.items()}
    options = draw(st.fixed_dictionaries({}, optional=usual))
    if draw(st.integers(0, 3)) == 0:
        name, value = draw(st.sampled_from([(name, value) for name, values in ODD.items() for value in values]))
        options[name] = value
    return options


MASKS = ("right", "holes", "empty", "short", "4-d")
IDS = ("float", "flat", "list", "foreign", "negative", "no rows", "long")
POSITIONS_GIVEN = ("shifted", "too far", "short", "negative", "both")


@st.composite
def inputs(draw):
    """(keywords of `generate` that are its inputs, sequences, tokens of the prompt); at most one is odd."""
    B, S = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    ids = torch.randint(0, VOCAB, (B, S), generator=generator)
    mask_kind = draw(any_of("none", "ones", "left", "left", "float", "bool"))
    ids_kind = draw(any_of("ids", "ids", "int32"))
    position_kind = draw(any_of("none", "none", "counted", "shifted", "embeds"))
    match draw(any_of(*["nothing"] * 6, "mask", "ids", "positions")):
        case "mask":
            mask_kind = draw(any_of(*MASKS))
        case "ids":
            ids_kind = draw(any_of(*IDS))
        case "positions":
            position_kind = draw(any_of(*POSITIONS_GIVEN))
    mask = mask_of(mask_kind, B, S, draw, generator)
    keywords = {"input_ids": ids_of(ids_kind, ids), "attention_mask": mask}
    match position_kind:
        case "counted":
            counted = torch.ones(B, S) if mask is None or mask.dim() != 2 else mask.float()
            keywords["position_ids"] = counted.cumsum(-1).long() - 1
        case "shifted" | "too far":
            keywords["position_ids"] = torch.arange(S)[None] + (3 if position_kind == "shifted" else POSITIONS)
        case "short":
            keywords["position_ids"] = torch.arange(S)[None, 1:]
        case "negative":
            keywords["position_ids"] = torch.arange(S).expand(B, -1) - 1
        case "embeds" | "both":
            keywords["inputs_embeds"] = torch.randn(B, S, 60, generator=generator)
            if position_kind == "embeds":
                del keywords["input_ids"]
    keywords = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in keywords.items() if v is not None}
    return keywords, B, S


def mask_of(kind: str, B: int, S: int, draw, generator) -> torch.Tensor | None:
    mask = torch.ones(B, S, dtype=torch.long)
    match kind:
        case "none":
            return None
        case "left":
            for row in range(B):
                mask[row, : draw(st.integers(0, S - 1))] = 0
        case "right":
            mask[-1, draw(st.integers(0, S - 1)) :] = 0
        case "holes":
            return torch.randint(0, 2, (B, S), generator=generator)
        case "empty":
            mask[0] = 0
        case "float":
            return mask.float()
        case "bool":
            return mask.bool()
        case "short":
            return mask[:, 1:]
        case "4-d":
            return mask[:, None, None]
    return mask


def ids_of(kind: str, ids: torch.Tensor):
    match kind:
        case "int32":
            return ids.int()
        case "float":
            return ids.float()
        case "flat":
            return ids[0]
        case "list":
            return ids.tolist()
        case "foreign":
            ids[-1, -1] = VOCAB
        case "negative":
            ids[0, 0] = -1
        case "no rows":
            return ids[:0]
        case "long":
            return ids.repeat(1, 30)
    return ids


CACHES = any_of(
    *["none"] * 6, "new", "new", "filled", "filled", "new", "filled", "full", "other batch", "foreign", "tuple"
)


def cache_of(kind: str, engine, B: int, ids):
    match kind:
        case "new":
            return engine.new_cache(B, 0)
        case "filled" | "full":
            kept = engine.new_cache(B, 4)
            if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.dtype == torch.int64 and len(ids) == B:
                part = ids[:, :-1] if kind == "filled" else ids
                if part.numel() and int(part.min()) >= 0 and int(part.max()) < VOCAB and part.shape[1] <= POSITIONS:
                    engine(part, past_key_values=kept)
            return kept
        case "other batch":
            return engine.new_cache(B + 1, 8)
        case "foreign":
            return DynamicCache(config=engine.module.config)
        case "tuple":
            return ((torch.zeros(1),),)
    return None


def keywords_for(engine, keywords: dict) -> dict:
    """Embeddings in the engine's dtype."""
    return {k: v.to(engine.dtype) if k == "inputs_embeds" else v for k, v in keywords.items()}


def check_result(result, options: dict, prompt, B: int) -> None:
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    assert isinstance(result, torch.Tensor) == (not options.get("return_dict_in_generate"))
    rows = B * (options.get("num_return_sequences") or 1)
    start = prompt.shape[1] if isinstance(prompt, torch.Tensor) else sequences.shape[1] - options["max_new_tokens"]
    assert sequences.dtype == torch.int64 and sequences.shape[0] == rows
    new = sequences[:, start:] if start >= 0 else sequences
    assert int(sequences.min()) >= 0 and int(sequences.max()) < VOCAB
    if isinstance(prompt, torch.Tensor):
        assert torch.equal(sequences[:, :start], prompt.repeat_interleave(rows // B, 0).long())
    limit = options.get("max_new_tokens") or min(20, POSITIONS - start)
    assert 1 <= new.shape[1] <= limit
    if new.shape[1] < limit and options.get("max_time") is None:
        ends = torch.tensor(options.get("eos_token_id") or [2], device=new.device).flatten()
        assert torch.isin(new, ends).any(1).all(), "cut short though a sequence had not ended"
    for name in ("scores", "logits"):
        values = getattr(result, name, None)
        if values is not None:
            assert len(values) == new.shape[1] and all(v.shape == (rows, VOCAB) for v in values)


@examples(300)
@given(
    kind=any_of("dense", "gather", "masked", "bf16", "auto"),
    given_inputs=inputs(),
    options=some_options(),
    cache_kind=CACHES,
)
def test_generation(kind, given_inputs, options, cache_kind):
    engine = engine_of(kind)
    keywords, B, _ = given_inputs
    keywords = keywords_for(engine, keywords)
    ids = keywords.get("input_ids")
    if (past := cache_of(cache_kind, engine, B, ids)) is not None:
        keywords["past_key_values"] = past
    torch.manual_seed(0)
    try:
        result = engine.generate(**keywords, **options)
    except Exception as error:
        check_refusal(error)
        return
    if "inputs_embeds" not in keywords and "input_ids" in keywords:
        check_result(result, options, ids, B)


@examples(150)
@given(
    kind=any_of("dense", "gather", "bf16"),
    given_inputs=inputs(),
    cache_kind=CACHES,
    options=st.fixed_dictionaries(
        {},
        optional={
            "logits_to_keep": any_of(0, 1, 3, 100, -1),
            "use_cache": any_of(True, False),
            "output_hidden_states": any_of(True, False),
            "return_dict": any_of(True),
        },
    ),
)
def test_forward(kind, given_inputs, cache_kind, options):
    engine = engine_of(kind)
    keywords, B, S = given_inputs
    keywords = keywords_for(engine, keywords)
    past = cache_of(cache_kind, engine, B, keywords.get("input_ids"))
    try:
        result = engine(**keywords, past_key_values=past, **options)
    except Exception as error:
        check_refusal(error)
        return
    keep = options.get("logits_to_keep", 0)
    tokens = S if not keep else min(keep, S)
    assert result.logits.shape == (B, tokens, VOCAB)
    if "attention_mask" not in keywords or bool(keywords["attention_mask"].all()):
        assert result.logits.isfinite().all()
    if options.get("use_cache") is not False and isinstance(past, dejavu_ds.cache.DejaVuCache):
        assert past.length <= past.capacity


# ---- configurations


MODELS = {
    "hidden_size": sometimes(any_of(60, 64), 61),
    "num_attention_heads": sometimes(any_of(2, 4), 3),
    "ffn_dim": any_of(1, 77, 128),
    "num_hidden_layers": any_of(1, 3),
    "word_embed_proj_dim": sometimes(any_of(None), 24),
    "do_layer_norm_before": sometimes(any_of(True), False),
    "activation_function": sometimes(any_of("relu"), "gelu"),
    "enable_bias": any_of(True, False),
    "layer_norm_elementwise_affine": any_of(True, True, False),
    "tie_word_embeddings": any_of(True, False),
}
SETTINGS = {
    "dtype": sometimes(
        any_of(None, "fp32", "bf16", torch.float16, torch.float32), "fp8", torch.int8, torch.float64, 3, "float"
    ),
    "quantize": sometimes(any_of(None, None, "nf4", "fp4"), "int3", 4, True, {"blocksize": 128}, {"blocks": 1}, [1]),
    "tensor_parallel": sometimes(any_of(None, {"tp_size": 1}), {"tp_size": 2}, {"tp_size": 0}, {"tp_size": "x"}, 1),
    "enable_cuda_graph": sometimes(any_of(None, False), True, "yes"),
    "max_out_tokens": sometimes(any_of(None, 1024), "many", -1, 8),
    "replace_method": sometimes(any_of(None, "auto"), "none"),
    "min_tokens": sometimes(any_of(None, 1), 3),
    "replace_with_kernel_inject": sometimes(any_of(None, False), True),
    "no_such_keyword": sometimes(any_of(None), 1),
    "config": sometimes(any_of(None, {}, {"dtype": "fp32"}), 3, "nowhere.json", {"nothing": 1}),
}
SPARSITY = {
    "mlp_density": sometimes(any_of(None, 0.5, 1.0, 1), 0, -1, 1.5, NAN, "half", True),
    "head_density": sometimes(any_of(None, 0.5, 1.0), 0.0, INF, [0.5]),
    "lookahead": sometimes(any_of(None, "half"), "full", "twice", 3),
    "mode": sometimes(any_of("gather", "masked", "auto"), "dense", None),
    "recovery_window": sometimes(any_of(1, 5, 128), 0, -3, 1.5, "long", True),
}


@examples(80)
@given(
    sizes=st.fixed_dictionaries({}, optional=MODELS),
    keywords=st.fixed_dictionaries({}, optional=SETTINGS),
    sparsity=st.one_of(st.none(), st.fixed_dictionaries({}, optional=SPARSITY)),
    predictors=any_of(*["fit"] * 3, "none", "other sizes", "path", "number"),
)
def test_configuration(sizes, keywords, sparsity, predictors):
    sizes = {name: value for name, value in sizes.items() if value is not None}
    try:
        model = tiny_opt(**sizes)
    except ValueError:
        return  # Hugging Face has no such model either
    keywords = {name: value for name, value in keywords.items() if value is not None}
    fitting = sizes.get("hidden_size", 60), sizes.get("ffn_dim", 77), sizes.get("num_attention_heads", 3)
    match predictors:
        case "fit" | "other sizes":
            try:
                some = random_predictors(model, "half", sizes=fitting if predictors == "fit" else (50, 30, 2))
            except ValueError as error:
                check_refusal(error)  # of a model that has no policy
            else:
                keywords["predictors"] = some
        case "path":
            keywords["predictors"] = "no/such/folder"
        case "number":
            keywords["predictors"] = 3
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    try:
        if sparsity is not None:
            keywords["sparsity"] = SparsityConfig(**sparsity)
        engine = dejavu_ds.init_inference(model, **keywords)
    except Exception as error:
        check_refusal(error)
        return
    tokens = engine.generate(ids, max_new_tokens=4, eos_token_id=None, do_sample=False)
    assert tokens.shape == (2, 10) and torch.equal(tokens[:, :6], ids)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCAB
