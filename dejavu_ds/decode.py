"""From tokens to logits through our cache: dense prefill, sparse decode step.

Hugging Face's own forward is not on this path, so the step depends on none of its cache or mask conventions, and all
that it touches can be captured in a CUDA graph.
"""

from collections.abc import Callable

import torch
from torch import nn

from dejavu_ds.block import PerToken
from dejavu_ds.cache import DejaVuCache
from dejavu_ds.injection_policies import Policy
from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.ops import ops_for


def prefill(
    model: nn.Module,
    policy: Policy,
    cache: DejaVuCache,
    inputs: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    keep: PerToken | None = None,
    hidden_states: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run S tokens densely and append them to the cache.

    Args:
        cache: with room for S more.
        inputs: [B, S] ids or [B, S, D] embeddings.
        mask: [B, S] bool, False for padding.
        position_ids: [B, S] int64, 0 for a sequence's first token; ignored for padding.
        keep: evaluation only, sparse at every position.
        hidden_states: a list to append every block's input to.

    Returns:
        [B, S, D], the last block's output.
    """
    start, stop = cache.length, cache.length + inputs.shape[1]
    cache.key_mask[:, start:stop] = mask
    attention_mask = _attention_mask(cache.key_mask[:, :stop], start)
    hidden = policy.embed(model, inputs, position_ids)
    for block, layer in zip(policy.layers(model), cache.layers, strict=True):
        if hidden_states is not None:
            hidden_states.append(hidden)
        hidden = block.prefill(hidden, layer, cache, attention_mask, keep)
    cache.advance(inputs.shape[1])
    cache.position_ids.copy_(_next_positions(position_ids, mask, cache.position_ids))
    return hidden


def decode_one_token(
    model: nn.Module,
    policy: Policy,
    cache: DejaVuCache,
    tokens: torch.Tensor,
    watch: Callable[[str, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """One new token a sequence, sparse where predictors are attached.

    Moves on what the cache holds on the device, not its `length`, so that it can be captured and replayed.

    Args:
        cache: with room for one more.
        tokens: [B] int64.
        watch: is shown the embeddings' and every layer's result, normalised for what comes next, with its name.

    Returns:
        [B, V] logits of the next token.
    """
    blocks = policy.layers(model)
    norm_first = blocks[0].norm_first
    # Those that make a block's input; the norms of a post-norm block are its own affair.
    norms = [Norm.of(block.attention_norm) if norm_first else None for block in blocks]
    norms.append(Norm.of(policy.final_norm(model)))
    rings = [*(layer.inputs for layer in cache.layers), None]
    ops, tables = ops_for(tokens.device), policy.embeddings(model)
    if tables is None or norms[0] is None:
        hidden = policy.embed(model, tokens[:, None], cache.position_ids[:, None]).squeeze(1)
        x = ops.add_norm(None, None, hidden, norms[0], rings[0], cache.position)
    else:
        hidden, x = ops.embed_norm(tokens, cache.position_ids, *tables, norms[0], rings[0], cache.position)
    if watch is not None:
        watch("the embeddings", x)
    # Projections that take the place of predictors before these have run would cost more than they gain.
    ahead = all(block.is_dense(cache) for block in blocks)
    for i, (block, layer) in enumerate(zip(blocks, cache.layers, strict=True)):
        x = block.decode(hidden, x, layer, cache, norms[i + 1], rings[i + 1], i == len(blocks) - 1, ahead)
        if watch is not None:
            watch(f"layer {i}", x)
    return policy.head(model, x)


def head(model: nn.Module, policy: Policy, hidden: torch.Tensor) -> torch.Tensor:
    """Output of the last block [..., D] -> logits [..., V]."""
    norm = policy.final_norm(model)
    return policy.head(model, hidden if norm is None else norm(hidden))


def _next_positions(position_ids: torch.Tensor, mask: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[B]: one after each sequence's last token that is no padding, `before` [B] where all are padding."""
    place = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1).amax(1)
    after = position_ids.gather(1, place.clamp_min(0)[:, None]).squeeze(1) + 1
    return torch.where(place >= 0, after, before)


def _attention_mask(key_mask: torch.Tensor, start: int) -> torch.Tensor | None:
    """[B, L] -> [B, 1, L - start, L] bool, or None where plain causal attention says the same."""
    if start == 0 and bool(key_mask.all()):
        return None
    stop = key_mask.shape[1]
    slots = torch.arange(stop, device=key_mask.device)
    causal = slots <= slots[start:, None]
    # A padding query attends to itself: nobody reads it, but a row without any key would be NaN.
    own = slots == slots[start:, None]
    return ((causal & key_mask[:, None, :]) | own)[:, None]
