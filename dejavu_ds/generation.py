"""The generation loop that Hugging Face's `generate` drives through `custom_generate`.

`generate` prepares inputs, logits processors and stopping criteria as for any model; this loop takes the place of its
`_sample`, with our cache and our decode step.
"""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, MaxLengthCriteria

from dejavu_ds.cache import DejaVuCache
from dejavu_ds.finite import raise_for, unusable
from dejavu_ds.token_loop import TokenChooser, generate_tokens, next_tokens

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from dejavu_ds.engine import DejaVuEngine


def prepare(model: PreTrainedModel, kwargs: dict[str, Any]) -> StoppingCriteriaList:
    """Refuse what the loop cannot do, and return the stopping criteria with those for stop strings.

    Args:
        model: whose own generation configuration says what is not given.
        kwargs: of `generate`; tokenizer and stop strings are taken out.

    Raises:
        ValueError, TypeError: by name, for what the loop or its cache cannot follow, or transformers would not notice.
    """
    given = copy.deepcopy(kwargs.get("generation_config"))
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length"):
        for length in (kwargs.get(name), getattr(given, name, None)):
            if not isinstance(length, Integral | None):
                raise TypeError(f"{name} must be a whole number, got {length!r}")
    others = {name: value for name, value in kwargs.items() if name != "generation_config"}
    config, _ = model._prepare_generation_config(given, **others)
    if config.use_cache is False:
        raise ValueError("use_cache=False: a decode step needs the cache, leave use_cache at True")
    if config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r}: the engine brings its own cache, leave it out"
        )
    if config.num_beams is not None and config.num_beams > 1:
        raise ValueError(f"num_beams={config.num_beams}: beam search is not supported, use num_beams=1")
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value!r} is not supported, use greedy search or sampling")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(f"{name}=True is not supported by generate; use engine.forward for hidden states")
    if (number := config.num_return_sequences) is not None and number < 1:
        raise ValueError(f"num_return_sequences must be at least 1, got {number}")
    if [] in (config.bad_words_ids or []):
        raise ValueError("bad_words_ids has an empty word, leave it out")
    if config.guidance_scale not in (None, 1) and kwargs.get("inputs_embeds") is not None:
        raise ValueError(f"guidance_scale={config.guidance_scale} needs input_ids: it runs the last token by itself")
    if config.is_assistant:
        raise ValueError("is_assistant=True: the engine cannot be the assistant of another model, leave it out")
    if config.token_healing:
        raise ValueError("token_healing=True is not supported: it changes the prompt under its mask, leave it out")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    tokenizer = kwargs.pop("tokenizer", None)
    if config.stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: pass tokenizer= to generate")
        # Made here, since `generate` does not keep the tokenizer where the loop is not its own.
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
        kwargs.pop("stop_strings", None)
        if given is not None:
            given.stop_strings = None
            kwargs["generation_config"] = given
    return criteria


def check_mask(mask: torch.Tensor, shape: torch.Size) -> None:
    """ValueError for an attention mask the loop cannot honour: shape, right padding, an empty sequence."""
    if mask.shape != shape:
        raise ValueError(f"attention_mask must be {list(shape)} like input_ids, got {list(mask.shape)}")
    if not bool((mask[:, -1] != 0).all()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise ValueError(
            f"sequence {row} of the batch is padded on the right (or empty): generation continues from the last "
            "column, so pad on the left (tokenizer padding_side='left')"
        )


def check_length(position_ids: torch.Tensor, new_tokens: int, max_positions: int) -> None:
    """ValueError when the prompt and the new tokens outrun the engine's `max_positions`."""
    prompt = int(position_ids.max()) + 1
    if prompt + new_tokens > max_positions:
        raise ValueError(
            f"prompt of {prompt} tokens + {new_tokens} new tokens = {prompt + new_tokens}, but there are "
            f"{max_positions} positions (the model's, or max_out_tokens if less); shorten the prompt or ask for at "
            f"most {max(0, max_positions - prompt)} new tokens"
        )


def check_continuation(cached: int, tokens: int, embedded: bool) -> None:
    """ValueError unless a prompt of `tokens` goes on from `cached` ones, as ids; embeddings cannot."""
    if cached and (embedded or tokens <= cached):
        raise ValueError(
            f"the cache holds {cached} tokens already: with past_key_values, give the ids of the whole sequences, "
            f"cached and new; got {'inputs_embeds' if embedded else 'input_ids'} of {tokens} tokens"
        )


def positions_of(given: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """[B, S] positions for the mask [B, S]: those given, repeated for `num_return_sequences`, or unmasked ones counted.

    Raises ValueError for a shape that does not fit, such as that of the new tokens alone.
    """
    if given is None:
        return mask.long().cumsum(1) - 1
    B, S = mask.shape
    if given.dim() != 2 or given.shape[1] != S or B % given.shape[0]:
        raise ValueError(f"position_ids must be [{B}, {S}] like input_ids, cached too, got {list(given.shape)}")
    return given.repeat_interleave(B // given.shape[0], dim=0)


@torch.no_grad()
def sample(
    model: nn.Module,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    engine: "DejaVuEngine",
    kept_cache: DejaVuCache | None,
    given_positions: torch.Tensor | None,
    to_streamer: "BaseStreamer | None",
    **model_kwargs,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Greedy search or sampling: prefill once, then one decode step a token.

    Args:
        input_ids: [B, S], the whole sequences, with what `cache` already holds.
        engine: whose forward is stepped.
        kept_cache: from an earlier call, or None.
        given_positions: [B, S] given by the caller, or None to count unmasked tokens.
        to_streamer: the caller's; `generate` does not hand its own on to a custom loop.
        model_kwargs: from `generate`; of these `attention_mask` and `inputs_embeds` are used.

    Returns:
        [B, S + new] token ids, or the output object with `return_dict_in_generate=True`.
    """
    new_tokens = generation_config.max_length - input_ids.shape[1]
    logits, cache, raise_here = _prefill(engine, input_ids, model_kwargs, kept_cache, given_positions, new_tokens)
    pad = _pad_token(stopping_criteria, generation_config, engine.module.config.vocab_size)
    record = generation_config.return_dict_in_generate
    wants_scores = record and (generation_config.output_scores or generation_config.output_logits)
    if not wants_scores and TokenChooser.fits(logits_processor, stopping_criteria):
        do_sample = generation_config.do_sample
        chooser = TokenChooser(logits_processor, stopping_criteria, do_sample, pad, engine.tp, engine.device)
        # A criterion of the caller's may end it before max_length does; one token is always made.
        ends = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
        new_tokens = max(1, min([*ends, generation_config.max_length]) - input_ids.shape[1])
        made = generate_tokens(engine, cache, logits, chooser, new_tokens, raise_here, to_streamer)
        output = torch.cat([input_ids, made], dim=1)
        output = GenerateDecoderOnlyOutput(sequences=output) if record else output
    else:
        output = _generate_on_host(
            engine,
            cache,
            logits,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            pad,
            raise_here,
            to_streamer,
        )
    cache.live.fill_(True)  # whoever continues with it does so for every sequence
    if to_streamer is not None:
        to_streamer.end()
    if record:
        output[cache_field(GenerateDecoderOnlyOutput)] = cache
    elif kept_cache is None:
        engine.runner.keep_spare(cache)
    return output


def _pad_token(criteria: StoppingCriteriaList, config: GenerationConfig, vocab_size: int) -> torch.Tensor | None:
    """[] int64, what finished sequences go on with; None: they go on generating.

    As in transformers: sequences that another criterion finished go on until all are done.
    """
    if not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        return None
    pad = config._pad_token_tensor
    if pad is not None and not 0 <= int(pad) < vocab_size:
        raise ValueError(
            f"pad_token_id {int(pad)} is outside the vocabulary of {vocab_size}: it is what a finished sequence of a "
            "batch goes on with"
        )
    return pad


def _generate_on_host(
    engine: "DejaVuEngine",
    cache: DejaVuCache,
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    pad: torch.Tensor | None,
    raise_here: Callable[[torch.Tensor | None], NoReturn],
    streamer: "BaseStreamer | None",
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The loop for processors and criteria that look at the text, and for scores that are asked for."""
    record, scores, raw_logits = config.return_dict_in_generate, [], []
    live = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    tokens = None
    while True:
        logits = logits.float()
        next_scores = logits_processor(input_ids, logits)
        bad = (unusable(logits, next_scores) & live).any().to(torch.uint8)
        if bool(engine.tp.broadcast(bad)):
            raise_here(tokens)
        if record and config.output_scores:
            scores.append(next_scores)
        if record and config.output_logits:
            raw_logits.append(logits)
        tokens = next_tokens(next_scores, config.do_sample)
        if pad is not None:
            tokens = torch.where(live, tokens, pad)
        # The ranks hold the same logits, but a random draw or a clock may differ: rank 0 decides.
        tokens = engine.tp.broadcast(tokens)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
        if streamer is not None:
            streamer.put(tokens.cpu())
        finished = stopping_criteria(input_ids, tuple(scores) if scores else None)
        live = engine.tp.broadcast((live & ~finished).to(torch.uint8)).bool()
        if not bool(live.any()):
            break
        cache.live.copy_(live)
        logits = engine.decode_one_token(tokens, cache)
    if not record:
        return input_ids
    return GenerateDecoderOnlyOutput(
        sequences=input_ids, scores=tuple(scores) or None, logits=tuple(raw_logits) or None
    )


def cache_field(output_class: type) -> str:
    """What this transformers calls the cache in an output: `past_key_values`, or `cache` in later ones."""
    names = {field.name for field in dataclasses.fields(output_class)}
    return "cache" if "cache" in names else "past_key_values"


def _prefill(
    engine: "DejaVuEngine",
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    kept_cache: DejaVuCache | None,
    given_positions: torch.Tensor | None,
    new_tokens: int,
) -> tuple[torch.Tensor, DejaVuCache, Callable[[torch.Tensor | None], NoReturn]]:
    """Check the prompt and run what is not cached of it.

    Returns:
        logits [B, V]; the cache, with room for the rest; what to call where no token can be chosen.
    """
    embeds = model_kwargs.get("inputs_embeds")
    prompt_shape = input_ids.shape if embeds is None else embeds.shape[:2]
    mask = model_kwargs.get("attention_mask")
    if mask is None:  # later versions of transformers drop one that hides nothing
        mask = torch.ones(prompt_shape, dtype=torch.long, device=input_ids.device)
    cached = 0 if kept_cache is None else kept_cache.length
    check_mask(mask, prompt_shape)
    check_continuation(cached, prompt_shape[1], embeds is not None)
    position_ids = positions_of(given_positions, mask)
    check_length(position_ids, new_tokens, engine.max_positions)
    room = prompt_shape[1] - cached + new_tokens
    cache = engine.runner.spare_cache(prompt_shape[0], room) if kept_cache is None else kept_cache
    cache = engine.cache_for(cache, prompt_shape[0], room)
    cache.live.fill_(True)
    forward = partial(
        engine.forward,
        input_ids=input_ids[:, cached:] if embeds is None else None,
        inputs_embeds=embeds,
        attention_mask=mask,
        position_ids=position_ids[:, cached:],
        past_key_values=cache,
        logits_to_keep=1,
    )
    return forward().logits[:, -1], cache, partial(raise_for, engine, cache, cached, forward)
