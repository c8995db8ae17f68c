"""`engine.generate` against Hugging Face's, and what it refuses."""

import threading
import time

import pytest
import torch
from models import PROMPTS, FixedSelector, bundled, fix_selection, tiny_opt
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

import dejavu_ds
from dejavu_ds.checkpoint import bundled_model


@pytest.fixture(
    params=[True, False] if torch.cuda.is_available() else [False], ids=lambda g: "graphs" if g else "eager"
)
def pair(device, request):
    """(Hugging Face's model, an engine of the same): with and without CUDA graphs where there is a GPU."""
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32, enable_cuda_graph=request.param)
    return tiny_opt().to(device), engine


def prompt(B=2, S=7, device="cpu"):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(3)).to(device)


class Collected:
    """A streamer that remembers."""

    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended = True


class AfterFive(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 12, device=input_ids.device)


class Favour(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 77] += 50.0 * (input_ids.shape[1] % 3 == 0)
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 5},
        pytest.param({"stopping_criteria": [AfterFive()]}, id="stopping_criteria"),
        pytest.param({"logits_processor": LogitsProcessorList([Favour()])}, id="logits_processor"),
        {"eos_token_id": list(range(60))},
        pytest.param({"stopping_criteria": [MaxLengthCriteria(12)]}, id="shorter than max_new_tokens"),
        pytest.param({"stopping_criteria": [MaxLengthCriteria(3)]}, id="shorter than the prompt"),
        pytest.param({"stopping_criteria": [EosTokenCriteria(list(range(60)))]}, id="the caller's end of sequence"),
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": True, "top_p": 0.8},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "min_p": 0.1},
        {"do_sample": True, "typical_p": 0.9},
        {"do_sample": True, "epsilon_cutoff": 0.01},
        {"do_sample": True, "eta_cutoff": 0.01},
        {"do_sample": True, "top_k": 9, "renormalize_logits": True},
        {"encoder_repetition_penalty": 1.2},
        {"sequence_bias": [[[5, 6], -3.0]]},
        {"bad_words_ids": [[77], [5, 6]]},
        {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [9]},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"guidance_scale": 1.5},
        {"min_length": 12},
        {"max_time": 100.0},
        {"prefill_chunk_size": 3},
        pytest.param({"watermarking_config": WatermarkingConfig()}, id="watermark"),
        pytest.param({"prefix_allowed_tokens_fn": lambda row, ids: [4, 5, 6]}, id="prefix_allowed_tokens_fn"),
        {"max_length": 13, "max_new_tokens": None},
        {"generation_config": GenerationConfig(max_new_tokens=4, pad_token_id=1, eos_token_id=2)},
    ],
    ids=str,
)
def test_equals_hugging_face(options, pair, device):
    reference, engine = pair
    ids = prompt(device=device)
    options = {"max_new_tokens": 15, **options} if "generation_config" not in options else options
    results = []
    for model in (reference, engine):
        torch.manual_seed(5)
        results.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    assert torch.equal(results[1], results[0])


def test_scores_and_logits(pair, device):
    reference, engine = pair
    ids = prompt(device=device)
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "do_sample": False}
    options |= {"output_scores": True, "output_logits": True}
    want, got = reference.generate(ids, **options), engine.generate(ids, **options)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert len(ours) == len(theirs) == 5
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_streamer_sees_every_token(pair, device):
    _, engine = pair
    ids, streamer = prompt(B=1, device=device), Collected()
    out = engine.generate(ids, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert torch.equal(torch.cat([v.flatten() for v in streamer.values]), out[0].cpu())


@pytest.fixture(scope="module")
def text_pair():
    """The bundled model with its tokenizer, as Hugging Face's and as an engine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")
    return bundled().to(device), dejavu_ds.init_inference(bundled_model(), dtype=torch.float32), tokenizer


def test_text_streamers(text_pair, device, capsys):
    reference, engine, tokenizer = text_pair
    inputs = tokenizer(PROMPTS[0], return_tensors="pt").to(device)
    options = {"max_new_tokens": 16, "do_sample": False}
    want = tokenizer.decode(reference.generate(**inputs, **options)[0], skip_special_tokens=True)
    engine.generate(**inputs, **options, streamer=TextStreamer(tokenizer, skip_special_tokens=True))
    assert capsys.readouterr().out == want + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    worker = threading.Thread(target=engine.generate, kwargs={**inputs, **options, "streamer": streamer})
    worker.start()
    pieces = list(streamer)
    worker.join()
    assert len(pieces) > 1 and PROMPTS[0] + "".join(pieces) == want


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_over_the_engine(text_pair):
    reference, engine, tokenizer = text_pair
    options = {"max_new_tokens": 12, "do_sample": False}
    results = [
        pipeline("text-generation", model=model, tokenizer=tokenizer, device=model.device)
        for model in (reference, engine)
    ]
    assert "DejaVuEngine" in repr(results[1])
    for text, more in (
        (PROMPTS[0], options),
        (PROMPTS[:5], {**options, "batch_size": 3}),
        (PROMPTS[3], {**options, "return_full_text": False, "stop_sequence": " the"}),
        ("", options),
    ):
        assert results[1](text, **more) == results[0](text, **more)
    sampled = []
    for pipe in results:
        torch.manual_seed(1)
        sampled.append(pipe(PROMPTS[1], max_new_tokens=12, num_return_sequences=2, return_tensors=True))
    assert sampled[0] == sampled[1] and len(sampled[0]) == 2


def test_without_a_prompt(pair):
    reference, engine = pair
    assert torch.equal(*(m.generate(max_new_tokens=5, do_sample=False) for m in (reference, engine)))


def test_the_end_of_time(pair, device):
    """One token is always made, and no time is left for another."""
    reference, engine = pair
    ids = prompt(device=device)
    begun = time.monotonic()
    for model in (reference, engine):
        assert model.generate(ids, max_new_tokens=300, eos_token_id=None, max_time=1e-9).shape == (2, 8)
    assert time.monotonic() - begun < 60


def test_a_models_own_beams_are_refused(device):
    """What a checkpoint's generation_config.json asks for counts as asked for, beside a config without it too."""
    model = tiny_opt()
    model.generation_config.num_beams = 3
    engine = dejavu_ds.init_inference(model, dtype=torch.float32)
    for options in ({}, {"generation_config": GenerationConfig(max_new_tokens=3)}):
        with pytest.raises(ValueError, match="num_beams=3"):
            engine.generate(prompt(device=device), **options)
    got = engine.generate(prompt(device=device), num_beams=1, max_new_tokens=3, do_sample=False)
    assert torch.equal(got, tiny_opt().to(device).generate(prompt(device=device), max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize("where", ["keyword", "generation_config"])
def test_stop_strings(where, device):
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    inputs = tokenizer("The king sat down and", return_tensors="pt").to(device)
    options = {"max_new_tokens": 30, "do_sample": False}
    if where == "keyword":
        options["stop_strings"] = [" man"]
    else:
        options = {"generation_config": GenerationConfig(**options, stop_strings=[" man"], pad_token_id=1)}
    want = bundled().to(device).generate(**inputs, **options, tokenizer=tokenizer)
    engine = dejavu_ds.init_inference(bundled_model(), dtype=torch.float32)
    assert torch.equal(engine.generate(**inputs, **options, tokenizer=tokenizer), want)
    assert want.shape[1] < inputs.input_ids.shape[1] + 30
    with pytest.raises(ValueError, match="tokenizer"):
        engine.generate(**inputs, **options)


def test_a_chat_turn_continues_a_kept_cache(pair, device):
    reference, engine = pair
    ids = prompt(B=1, device=device)
    first = engine.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    cache = first["cache"] if "cache" in first else first["past_key_values"]
    longer = torch.cat([first.sequences, prompt(B=1, S=3, device=device)], dim=1)
    got = engine.generate(longer, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, reference.generate(longer, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"do_sample": True}], ids=str)
def test_three_turns_over_one_cache(options, pair, device):
    """Each turn adds several tokens to what the last one left; the cache is the caller's own and grows."""
    reference, engine = pair
    ids, cache = prompt(B=3, S=4, device=device), engine.new_cache(3, 0)
    options = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False, **options}
    for turn in range(3):
        ids = torch.cat([ids, prompt(B=3, S=2 + turn, device=device)], dim=1)
        torch.manual_seed(turn)
        want = reference.generate(ids, **options)
        torch.manual_seed(turn)
        ids = engine.generate(ids, past_key_values=cache, **options)
        assert torch.equal(ids, want)
        assert cache.length == ids.shape[1] - 1


@pytest.mark.parametrize("kept", [5, 7, 12])
def test_a_cropped_cache_goes_on(kept, pair, device):
    """Another turn in the place of the last: of the 16 cached tokens some are forgotten, in a padded batch."""
    reference, engine = pair
    ids = prompt(S=12, device=device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    cache = engine.new_cache(2, 4)
    first = engine.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    cache.crop(kept)
    other = torch.cat([first[:, :kept], prompt(S=4, device=device)], dim=1)
    mask = torch.cat([torch.ones_like(first)[:, :kept], torch.ones(2, 4, dtype=torch.long, device=device)], dim=1)
    mask[0, :3] = 0
    want = reference.generate(other, attention_mask=mask, **options)
    assert torch.equal(engine.generate(other, attention_mask=mask, past_key_values=cache, **options), want)
    with pytest.raises(ValueError, match=r"holds \d+ tokens .* 99"):
        cache.crop(99)


@pytest.mark.parametrize("crop", [1, 4, 9])
def test_a_cropped_sparse_cache_has_every_key(crop, device):
    """Heads that have skipped tokens make them up after the crop too: gather against masked, which misses none."""
    ids = prompt(S=40, device=device)
    idle = [torch.tensor(m, device=device) for m in ([True, False, False], [False, True, False])]

    def run(masked):
        engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
        fix_selection(engine, heads=lambda i: [idle[t // 5 % 2] for t in range(40)], masked=masked, window=6)
        cache = engine.new_cache(2, 8)
        engine(ids[:, :8], past_key_values=cache)
        for t in range(8, 30):
            engine(ids[:, [t]], past_key_values=cache)
        cache.crop(30 - crop)
        chunk = engine(ids[:, 30 - crop : 33], past_key_values=cache).logits
        cache.crop(30 - crop)
        steps = [engine(ids[:, [t]], past_key_values=cache).logits for t in range(30 - crop, 40)]
        return torch.cat([chunk, *steps], 1)

    torch.testing.assert_close(run(False), run(True), atol=2e-4, rtol=2e-4)


def test_embeddings_as_prompt(pair, device):
    reference, engine = pair
    ids = prompt(device=device)
    embeds = reference.get_input_embeddings()(ids)
    options = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(engine.generate(**options), reference.generate(**options))


def test_explicit_positions(pair, device):
    reference, engine = pair
    ids = prompt(device=device)
    positions = torch.arange(7, device=device).expand(2, -1) + 11
    options = {"position_ids": positions, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(engine.generate(ids, **options), reference.generate(ids, **options))


def test_rows_that_finish_early_are_padded_and_change_no_other(pair, device):
    reference, engine = pair
    ids = prompt(B=4, device=device)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": list(range(0, 131, 7)), "pad_token_id": 1}
    want = reference.generate(ids, **options)
    lengths = (want[:, 7:] != 1).sum(1)
    assert len(set(lengths.tolist())) > 1, "the rows must finish at different steps for the test to say anything"
    assert torch.equal(engine.generate(ids, **options), want)


def test_finished_and_padding_rows_choose_nothing(device):
    """The sets are the union over live sequences: a dead row's choice leaves the others' logits alone."""
    from test_lookahead import random_predictors

    def run(second_row, live):
        engine = dejavu_ds.init_inference(
            tiny_opt(), predictors=random_predictors(tiny_opt(), "half"), dtype=torch.float32
        )
        ids = torch.cat([prompt(B=1, S=9, device=device), second_row])
        cache = engine.new_cache(2, 12)
        engine(input_ids=ids[:, :6], past_key_values=cache)
        cache.live.copy_(torch.tensor(live))
        return torch.stack([engine.decode_one_token(ids[:, t], cache)[0] for t in range(6, 9)])

    a = torch.randint(3, 131, (1, 9), generator=torch.Generator().manual_seed(8)).to(device)
    b = torch.randint(3, 131, (1, 9), generator=torch.Generator().manual_seed(9)).to(device)
    torch.testing.assert_close(run(a, [True, False]), run(b, [True, False]), atol=1e-5, rtol=1e-5)
    assert (run(a, [True, True]) - run(b, [True, True])).abs().max() > 1e-3


def test_left_padding_changes_nothing_under_sparsity(device):
    """A prompt alone and the same prompt left padded, with predictors: the same tokens."""
    from test_lookahead import random_predictors

    engine = dejavu_ds.init_inference(tiny_opt(), predictors=random_predictors(tiny_opt(), "half"), dtype=torch.float32)
    ids = prompt(B=1, device=device)
    want = engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[:, 7:]
    padded = torch.nn.functional.pad(ids, (5, 0), value=1)
    got = engine.generate(padded, attention_mask=(padded != 1).long(), max_new_tokens=20, do_sample=False)[:, 12:]
    assert torch.equal(got, want)


def test_sparse_selection_follows_the_loop(device):
    """Every step of generate is a decode step of the blocks: fixed sets are consumed one a token."""
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    masks = [torch.ones(77, dtype=torch.bool, device=device)]
    fix_selection(engine, mlp=lambda i: masks)
    engine.generate(prompt(B=1, device=device), max_new_tokens=9, do_sample=False, eos_token_id=None)
    selectors = [block.mlp.selector for block in engine.blocks]
    assert all(isinstance(s, FixedSelector) and s.step == 8 for s in selectors)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams=3"),
        ({"use_cache": False}, "use_cache"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"custom_generate": print}, "custom_generate"),
        ({"max_new_tokens": 394}, r"7 tokens \+ 394 .* 401.* 400 positions"),
        ({"max_new_tokens": 5, "past_key_values": ()}, "tuple"),
        ({"prompt_lookup_num_tokens": 2}, "assisted"),
        ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=2)}, "assisted"),
        pytest.param({"assistant_model": tiny_opt()}, "assisted", id="assistant_model"),
        ({"assistant_early_exit": 2}, "assisted"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "contrastive_search"),
        ({"dola_layers": "high"}, "dola_generation"),
        ({"num_beams": 2, "force_words_ids": [[5]]}, "num_beams=2"),
        ({"token_healing": True}, "token_healing"),
        ({"is_assistant": True}, "is_assistant"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"do_sample": True, "num_return_sequences": -1}, "num_return_sequences must be at least 1, got -1"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens must be a whole number, got 2\.5"),
        ({"generation_config": GenerationConfig(max_length=30.5)}, r"max_length .* got 30\.5"),
        ({"bad_words_ids": [[]]}, "bad_words_ids has an empty word"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"repetition_penalty": -1.0}, r"-1\.0"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"max_new_tokens": 4, "pad_token_id": 500}, "pad_token_id 500 .*131"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
    ids=str,
)
def test_refusals(options, message, pair, device):
    streamer = Collected()
    with pytest.raises((ValueError, TypeError), match=message):
        pair[1].generate(prompt(B=1, device=device), streamer=streamer, **options)
    assert len(streamer.values) <= 1, "nothing but the prompt may have been streamed"


def test_the_last_position_can_be_used(pair, device):
    reference, engine = pair
    ids = torch.randint(3, 131, (1, 390), device=device)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    assert torch.equal(engine.generate(ids, **options), reference.generate(ids, **options))


def test_right_padding_is_refused(pair, device):
    ids = prompt(device=device)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with pytest.raises(ValueError, match=r"sequence 1 .*left"):
        pair[1].generate(ids, attention_mask=mask, max_new_tokens=3)


@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
        (torch.tensor([[3, 500]]), "500 .*131"),
        (torch.tensor([[3, -4]]), "-4"),
        (torch.tensor([3, 4]), r"\[2\]"),
    ],
    ids=["empty", "too large", "negative", "one-dimensional"],
)
def test_bad_ids(ids, message, pair, device):
    with pytest.raises(ValueError, match=message):
        pair[1].generate(ids.to(device), max_new_tokens=3)
    with pytest.raises(ValueError, match=message):
        pair[1](ids.to(device))
