"""NaN and infinity are named by layer, in weights and in what a layer makes of a token, and never sampled from."""

import copy

import pytest
import torch
from models import fix_selection, tiny_opt
from test_lookahead import random_predictors
from transformers import LogitsProcessor, LogitsProcessorList

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.finite import NonFiniteError, check_weights, finite, unusable

NAN, INF = float("nan"), float("inf")


def prompt(B=2, S=7, device="cpu"):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(3)).to(device)


def engine_of(model=None, sparse=False, **kwargs):
    if sparse:
        kwargs |= {"predictors": random_predictors(tiny_opt(), "half"), "sparsity": SparsityConfig(0.4, 0.6)}
    return dejavu_ds.init_inference(model or tiny_opt(), **{"dtype": torch.float32, **kwargs})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_value_among_many(value, dtype, device):
    x = torch.randn(7, 300, device=device).to(dtype)
    assert finite(x) and finite(x[:0])
    x[5, 123] = value
    assert not finite(x)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "name",
    [
        "decoder.embed_tokens.weight",
        "decoder.embed_positions.weight",
        "decoder.layers.1.self_attn.v_proj.weight",
        "decoder.layers.2.fc2.bias",
        "decoder.layers.0.final_layer_norm.weight",
    ],
)
def test_a_weight_is_named(name, value):
    model = tiny_opt()
    model.get_parameter(f"model.{name}").data.flatten()[11] = value
    # A tied head is a shard of its own until the engine ties it again.
    with pytest.raises(NonFiniteError, match=f"{name}(, lm_head.weight)?; in float32"):
        engine_of(model)


def test_several_weights_and_the_head():
    model = tiny_opt(tie_word_embeddings=False)
    for layer in model.model.decoder.layers:
        layer.fc1.weight.data[3, 4] = NAN
    model.lm_head.weight.data[0, 0] = INF
    with pytest.raises(NonFiniteError, match=r"layers\.0\.fc1\.weight, .*layers\.2\.fc1\.weight and 1 more"):
        engine_of(model)


def test_a_weight_that_fp16_cannot_hold():
    model = tiny_opt()
    model.model.decoder.layers[1].fc1.weight.data[3, 4] = 1e5
    with pytest.raises(NonFiniteError, match=r"layers\.1\.fc1\.weight; fp16 ends at 65504: use dtype bfloat16"):
        engine_of(model, dtype=torch.float16)


def test_a_shards_weight_is_named_on_every_rank():
    """Rank 1 of two finds NaN in what rank 0 has found sound."""

    class Two:
        def all_reduce(self, x):
            return x + torch.tensor([0.0, 1.0])

    with pytest.raises(NonFiniteError, match="weights bias"):
        check_weights(torch.nn.Linear(2, 2), Two(), torch.device("cpu"))


def test_a_predictor_is_named():
    predictors = random_predictors(tiny_opt(), "half")
    predictors.mlp[2].w2.data[5, 3] = NAN
    with pytest.raises(ValueError, match=r"mlp predictor of layer 2 .*NaN"):
        dejavu_ds.init_inference(tiny_opt(), predictors=predictors, dtype=torch.float32)


def break_layer(engine, layer: int, value: float, position: int) -> None:
    """A layer adds `value`, what an overflow would leave: everywhere for position 0, else from that token on.

    The device decides, so a graph of the step is broken at the same token.
    """
    mlp = engine.blocks[layer].mlp
    prefill, decode = mlp.prefill, mlp.decode

    def broken(x, hidden, cache, *args):
        return decode(x + torch.where(cache.position >= position, value, 0.0).to(x.dtype), hidden, cache, *args)

    mlp.decode = broken
    engine.runner.release()  # a graph of before would go on as it is
    if not position:
        mlp.prefill = lambda x, *args: prefill(x + value, *args)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("layer, position, where", [(1, 0, "the prompt"), (2, 10, "position 10"), (0, 7, "position 7")])
def test_a_layer_is_named(layer, position, where, value, sparse, options, device):
    """In the prefill, or in the step of a token; before that the tokens are the sound ones."""
    ids, tokens = prompt(device=device), []
    sound = position - 6 if position else 0

    class Streamer:
        def put(self, values):
            tokens.append(values)

        def end(self):
            pass

    engine = engine_of(sparse=sparse)
    torch.manual_seed(0)
    want = engine.generate(ids, max_new_tokens=12, eos_token_id=None, **options)[:, 7 : 7 + sound]
    break_layer(engine, layer, value, position)
    torch.manual_seed(0)
    with pytest.raises(NonFiniteError, match=f"^layer {layer} gave NaN or infinity for .*{where}; in float32"):
        engine.generate(ids, max_new_tokens=12, eos_token_id=None, streamer=Streamer(), **options)
    # The streamer gets a batch of tokens a step, after the prompt.
    assert len(tokens[1:]) == sound
    assert all(torch.equal(t.cpu(), column) for t, column in zip(tokens[1:], want.T.cpu(), strict=True))


def test_fp16_that_overflows(device):
    """Weights that are all finite, and activations that fp16 cannot hold: the layer where they start."""
    model = tiny_opt()
    model.model.decoder.layers[1].fc2.weight.data.fill_(3e4)
    model.model.decoder.layers[1].fc1.weight.data.mul_(50)
    ids = prompt(B=1, device=device)
    same = copy.deepcopy(model)
    assert engine_of(model).generate(ids, max_new_tokens=3, eos_token_id=None).shape == (1, 10)
    with pytest.raises(NonFiniteError, match=r"^layer 1 gave .* for the prompt; fp16 ends at 65504"):
        engine_of(same, dtype=torch.float16).generate(ids, max_new_tokens=3)


def test_embeddings_that_are_given(device):
    engine = engine_of()
    embeds = engine.module.get_input_embeddings()(prompt(device=device)).clone()
    embeds[1, 2, 3] = NAN
    with pytest.raises(NonFiniteError, match=r"^the embeddings gave NaN"):
        engine.generate(inputs_embeds=embeds, max_new_tokens=3)


def test_the_head(device):
    engine = engine_of()
    engine.module.lm_head.weight = torch.nn.Parameter(engine.module.lm_head.weight.detach().clone())
    engine.module.lm_head.weight.data[9, 4] = INF
    with pytest.raises(NonFiniteError, match=r"^the language-model head gave NaN or infinity for the prompt"):
        engine.generate(prompt(device=device), max_new_tokens=3)


def test_a_kept_cache_survives_the_error(device):
    """The run is repeated from where it began: the cache holds the same tokens, and another engine goes on with it."""
    engine, ids = engine_of(), prompt(device=device)
    cache = engine.new_cache(2, 30)
    engine.generate(ids[:, :4], past_key_values=cache, max_new_tokens=2, eos_token_id=None)
    break_layer(engine, 1, NAN, 0)
    with pytest.raises(NonFiniteError, match="for the prompt"):
        engine.generate(ids, past_key_values=cache, max_new_tokens=2)
    cache.crop(4)
    got = engine_of().generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(got[:, :7], ids)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_processors_that_leave_no_token(value, do_sample, device):
    class Everything(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, value) if input_ids.shape[1] == 9 else scores

    options = {"max_new_tokens": 5, "eos_token_id": None, "do_sample": do_sample}
    with pytest.raises(ValueError, match=r"after the token at position 8: the logits are finite, but the processors"):
        engine_of().generate(prompt(device=device), logits_processor=LogitsProcessorList([Everything()]), **options)


def test_a_temperature_that_overflows(device):
    with pytest.raises(ValueError, match="after the prompt: the logits are finite, but the processors"):
        engine_of().generate(prompt(device=device), do_sample=True, temperature=1e-40, max_new_tokens=3)


def test_a_finished_sequence_may_be_anything():
    """Rows that have ended are nobody's: only live ones count."""
    logits = torch.zeros(3, 5)
    logits[1, 2] = NAN
    scores = logits.clone()
    scores[2] = -INF
    assert unusable(logits, logits).tolist() == [False, True, False]
    assert unusable(logits, scores).tolist() == [False, True, True]


def test_fixed_sets_are_watched_too(device):
    engine = engine_of()
    fix_selection(engine, mlp=lambda i: [torch.ones(77, dtype=torch.bool, device=device)])
    break_layer(engine, 2, NAN, 9)
    with pytest.raises(NonFiniteError, match=r"^layer 2 "):
        engine.generate(prompt(device=device), max_new_tokens=9, eos_token_id=None)
