"""What a forward call is given: ids or embeddings, their mask and their positions."""

import torch
from torch import nn

from dejavu_ds.cache import DejaVuCache


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """ValueError for an input that lies elsewhere than the engine."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the engine on {device}: move it with .to(engine.device)")


def check_inputs(
    embedding: nn.Embedding, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> torch.Tensor:
    """The one that is given, ids [B, S] or embeddings [B, S, D]; ValueError or TypeError with what is wrong in it."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if inputs_embeds is not None:
        width = embedding.weight.shape[1]
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != width or inputs_embeds.numel() == 0:
            raise ValueError(
                f"inputs_embeds must be [batch, tokens, {width}] with at least one token, got "
                f"{list(inputs_embeds.shape)}"
            )
        if inputs_embeds.dtype != embedding.weight.dtype:
            raise TypeError(f"inputs_embeds must be {embedding.weight.dtype} like the model, got {inputs_embeds.dtype}")
        check_device("inputs_embeds", inputs_embeds, embedding.weight.device)
        return inputs_embeds
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        found = input_ids.dtype if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids must be a tensor of int64 or int32, got {found}")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be [batch, tokens] with at least one token, got {list(input_ids.shape)}")
    check_device("input_ids", input_ids, embedding.weight.device)
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= embedding.num_embeddings:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the vocabulary of {embedding.num_embeddings}")
    return input_ids


def mask_and_positions(
    past: DejaVuCache,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    B: int,
    S: int,
    max_positions: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of the new tokens and their positions, both [B, S].

    Raises ValueError for shapes that do not fit, or a position that the model does not have.
    """
    if attention_mask is None:
        attention_mask = torch.ones(B, S, dtype=torch.bool, device=past.key_mask.device)
    if attention_mask.shape not in ((B, S), (B, past.length + S)):
        raise ValueError(
            f"attention_mask must be [{B}, {S}] or, with the cached tokens, [{B}, {past.length + S}]; "
            f"got {list(attention_mask.shape)}"
        )
    check_device("attention_mask", attention_mask, past.key_mask.device)
    mask = attention_mask[:, -S:].bool()
    if position_ids is None:
        position_ids = attention_mask.bool().long().cumsum(1)[:, -S:] - 1
        if past.length and attention_mask.shape[1] == S:
            position_ids = position_ids + past.position_ids[:, None]
    elif position_ids.shape not in ((B, S), (1, S)):
        raise ValueError(f"position_ids must be [{B}, {S}] for the new tokens, got {list(position_ids.shape)}")
    check_device("position_ids", position_ids, past.key_mask.device)
    low = int(torch.where(mask, position_ids, 0).min())
    # What stands at padding does not matter; the policies know -1 for it.
    position_ids = torch.where(mask, position_ids, -1)
    high = int(position_ids.max())
    if low < 0 or high >= max_positions:
        raise ValueError(
            f"position {low if low < 0 else high} is not one of the {max_positions} positions (the model's, or "
            f"max_out_tokens if less), 0..{max_positions - 1}; shorten the input, or correct position_ids"
        )
    return mask, position_ids
