"""Hugging Face models whose weights are what bitsandbytes makes of them and back, for tests of quantisation."""

import torch
from torch import nn

from dejavu_ds.quantize import QuantizeConfig, bitsandbytes_functional


def round_trip(weight: torch.Tensor, config: QuantizeConfig) -> torch.Tensor:
    """A weight [rows, D] through bitsandbytes' own functions."""
    functional = bitsandbytes_functional()
    data, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=config.blocksize, quant_type=config.type, compress_statistics=config.nested
    )
    return functional.dequantize_4bit(data, state)


@torch.no_grad()
def quantize_in_place(model: nn.Module, config: QuantizeConfig) -> nn.Module:
    """Replace the blocks' weights of an OPT by what they become in the gather layout of one rank.

    Query, key and value are rows grouped by head; the output projection and fc2 are transposed.
    """
    heads = model.config.num_attention_heads
    for layer in model.model.decoder.layers:
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        by_head = torch.stack([p.weight.unflatten(0, (heads, -1)) for p in projections], dim=1)
        rounded = round_trip(by_head.flatten(0, 2), config).view(by_head.shape)
        for part, projection in enumerate(projections):
            projection.weight.copy_(rounded[:, part].flatten(0, 1))
        layer.fc1.weight.copy_(round_trip(layer.fc1.weight, config))
        for linear in (attention.out_proj, layer.fc2):
            linear.weight.copy_(round_trip(linear.weight.T, config).T)
    return model
