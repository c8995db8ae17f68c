"""Generation in which nothing but the tokens leaves the device between two steps.

It serves greedy search and plain sampling that ends at a length or an end-of-sequence token, which is most of what is
asked for. What must look at the text so far, or at the scores, goes through the loop in `dejavu_ds.generation`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dejavu_ds.cache import DejaVuCache
from dejavu_ds.collectives import TensorParallel
from dejavu_ds.finite import unusable

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from dejavu_ds.engine import DejaVuEngine

# Functions of the scores alone, without a question to the device.
_PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def next_tokens(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """[B, V] scores -> [B]: drawn from their distribution, or the likeliest."""
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1) if do_sample else scores.argmax(-1)


class TokenChooser:
    """From logits to the next tokens, on the device, so that it can be captured in a CUDA graph.

    Args:
        processors: of the kinds that `fits` accepts.
        criteria: likewise.
        do_sample: draw from the distribution in place of its maximum.
        device: of the logits.
        pad: [] int64, what finished sequences go on with; None: they go on generating.
        tp: the ranks must draw the same.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        do_sample: bool,
        pad: torch.Tensor | None,
        tp: TensorParallel,
        device: torch.device,
    ) -> None:
        self._processors, self._do_sample, self._pad, self._tp = processors, do_sample, pad, tp
        ends = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
        # The caller's own criteria are made on the CPU.
        self._eos = torch.cat([end.flatten().to(device) for end in ends]) if ends else None

    @staticmethod
    def fits(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
        """Whether these can be honoured on the device."""
        return all(type(p) in _PROCESSORS for p in processors) and all(
            type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in criteria
        )

    def key(self) -> str:
        """Two choosers of one key do the same."""
        eos = None if self._eos is None else self._eos.tolist()
        pad = None if self._pad is None else int(self._pad)
        return repr(
            ([(type(p).__name__, sorted(vars(p).items())) for p in self._processors], self._do_sample, eos, pad)
        )

    def __call__(self, logits: torch.Tensor, cache: DejaVuCache) -> torch.Tensor:
        """Put the next tokens into the cache, and who is still live.

        Returns:
            [B + 2] int64: the tokens, whether any sequence is live, and whether one's token could not be chosen.
        """
        logits = logits.float()
        scores = self._processors(cache.tokens[:, None], logits)
        bad = unusable(logits, scores) & cache.live
        if self._do_sample:
            # A draw from NaN would end the process on a GPU, before anybody could say where it came from.
            scores = scores.masked_fill(bad[:, None], 0.0)
        tokens = next_tokens(scores, self._do_sample)
        if self._do_sample:
            # The ranks hold the same scores, but draw from generators of their own: rank 0 decides.
            tokens = self._tp.broadcast(tokens)
        if self._pad is not None:
            tokens = torch.where(cache.live, tokens, self._pad)
        cache.tokens.copy_(tokens)
        if self._eos is not None:
            cache.live.logical_and_((tokens[:, None] != self._eos).all(1))
        return torch.cat([tokens, torch.stack([cache.live.any(), bad.any()]).long()])


def generate_tokens(
    engine: "DejaVuEngine",
    cache: DejaVuCache,
    logits: torch.Tensor,
    chooser: TokenChooser,
    new_tokens: int,
    raise_for: Callable[[torch.Tensor | None], NoReturn],
    streamer: "BaseStreamer | None" = None,
) -> torch.Tensor:
    """Up to `new_tokens` tokens for every sequence of a prefilled cache, after the prompt's logits [B, V].

    `raise_for` is called where a token cannot be chosen: with the tokens [B] of the step before, None for the prompt.

    Returns:
        [B, n] int64 on the engine's device; n is less if every sequence has ended.
    """
    choose, made = None, []
    outcome = chooser(logits, cache)
    while True:
        *tokens, any_live, any_bad = outcome.tolist()
        if any_bad:
            raise_for(torch.tensor(made[-1], device=engine.device) if made else None)
        made.append(tokens)
        if streamer is not None:
            streamer.put(torch.tensor(tokens))
        if len(made) == new_tokens or not any_live:
            break
        engine.runner.step(cache)
        choose = choose or engine.runner.chooser(cache, chooser)
        outcome = choose()
    return torch.tensor(made, device=engine.device).T
