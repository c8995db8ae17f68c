"""NaN and infinity: found before a token is drawn from them, and named by layer.

Weights are looked at once, when the engine is made. Of the activations only the logits are, on the device and at every
step: what is NaN or infinite in a layer makes every later layer norm NaN, and so the logits. Only then is the run that
gave them repeated, layer by layer, to see where it began.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from dejavu_ds import decode
from dejavu_ds.cache import DejaVuCache
from dejavu_ds.collectives import TensorParallel

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from dejavu_ds.engine import DejaVuEngine


# Bytes of an error's text that other ranks are told.
_LONGEST_TEXT = 2048


class NonFiniteError(ValueError):
    """Weights or activations are NaN or infinite; the message names the tensors, or the layer that gave them."""


def finite(x: torch.Tensor) -> bool:
    """Whether every element is; reads `x` once and makes no tensor of its size."""
    return x.numel() == 0 or all(bool(end.isfinite()) for end in x.aminmax())


@torch.no_grad()
def check_weights(model: nn.Module, tp: TensorParallel, device: torch.device) -> None:
    """Collective, before the weights are packed: what one rank's shard holds is named on every rank.

    Args:
        model: with the same parameters, by name, on every rank.
        device: for communication.

    Raises:
        NonFiniteError: with the names of the first such parameters.
    """
    parameters = dict(model.named_parameters())
    bad = torch.tensor([float(not finite(p)) for p in parameters.values()], device=device)
    names = [name for name, ranks in zip(parameters, tp.all_reduce(bad).tolist(), strict=True) if ranks]
    if names:
        dtype = parameters[names[0]].dtype
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise NonFiniteError(f"NaN or infinity in the weights {', '.join(names[:3])}{more}; {_way_out(dtype)}")


@contextmanager
def raised_everywhere(tp: TensorParallel, device: torch.device) -> Iterator[None]:
    """Collective: what any rank finds in the weights that it reads inside is raised on every rank.

    One that raised alone would leave the others waiting for it. `device` is for communication.
    """
    error = None
    try:
        yield
    except NonFiniteError as found:
        error = found
    if tp.size > 1:
        texts = torch.zeros(tp.size, _LONGEST_TEXT, dtype=torch.int32, device=device)
        if error is not None:
            own = torch.tensor(list(str(error).encode()[:_LONGEST_TEXT]), dtype=torch.int32)
            texts[tp.rank, : len(own)] = own.to(device)
        found = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in tp.all_reduce(texts).cpu().tolist()]
        error = error or next((NonFiniteError(text) for text in found if text), None)
    if error is not None:
        raise error


def unusable(logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """[B] bool: sequences whose next token cannot be chosen. No question to the device.

    Args:
        logits: [B, V] fp32; none may be NaN or infinite.
        scores: [B, V], what the processors made of them, or the same tensor; -inf rules tokens out, but not all.
    """
    low, high = logits.aminmax(dim=-1)
    usable = (high - low).isfinite()
    if scores is not logits:
        usable = usable & scores.amax(-1).isfinite()
    return ~usable


def raise_for(
    engine: "DejaVuEngine",
    cache: DejaVuCache,
    start: int,
    prefill: "Callable[..., CausalLMOutputWithPast]",
    tokens: torch.Tensor | None,
) -> NoReturn:
    """Repeat what gave unusable logits, and raise with the place where it went wrong. Collective.

    Args:
        cache: as the run left it; it is moved back and on again.
        start: filled slots before the prefill.
        prefill: the forward call, which appends to the cache.
        tokens: [B] of the decode step that gave the logits; None: they are the prefill's.

    Raises:
        NonFiniteError: naming the layer, the embeddings or the head.
        ValueError: the logits are finite, so the processors have left no token to choose.
    """
    places: list[str] = []

    def watch(place: str, x: torch.Tensor) -> None:
        if not places and not finite(x):
            places.append(place)

    if tokens is None:
        what = "the prompt"
        cache.crop(start)
        output = prefill(output_hidden_states=True)
        for number, hidden in enumerate(output.hidden_states):
            watch(f"layer {number - 1}" if number else "the embeddings", hidden)
        logits = output.logits
    else:
        what = f"the token at position {cache.length - 1}"
        cache.crop(cache.length - 1)
        cache.tokens.copy_(tokens)
        logits = decode.decode_one_token(engine.module, engine.policy, cache, cache.tokens, watch)
        cache.length += 1
    watch("the language-model head", logits)
    if places:
        raise NonFiniteError(f"{places[0]} gave NaN or infinity for {what}; {_way_out(engine.dtype)}")
    raise ValueError(
        f"no token can be chosen after {what}: the logits are finite, but the processors (temperature, suppressed "
        "tokens, your own) leave scores that are all -inf, NaN or infinite; loosen them"
    )


def _way_out(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return "fp16 ends at 65504: use dtype bfloat16 or float32, and if it stays, load the checkpoint anew"
    return f"in {str(dtype).removeprefix('torch.')} that is no overflow of a sound model: load the checkpoint anew"
