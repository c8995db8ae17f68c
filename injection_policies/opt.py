"""OPT (Zhang et al. 2022, arXiv:2205.01068) with ReLU, pre-norm or, as opt-350m, post-norm: the family of Deja Vu.

Replaced is each `OPTDecoderLayer` of `model.model.decoder.layers`. The block keeps the children's names, so DeepSpeed
finds the linears where it would in the original layer: q/k/v_proj and fc1 are split by rows (heads, neurons), out_proj
and fc2 by columns, and their outputs are summed over the ranks.
"""

import torch
from torch import nn

from dejavu_ds.injection_policies.base import BlockParts, Embeddings

_SIZES = (
    "hidden_size",
    "ffn_dim",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "word_embed_proj_dim",
)


class OPTPolicy:
    model_type = "opt"
    row_parallel = ("self_attn.out_proj", ".fc2")

    def check(self, config) -> None:
        sizes = {name: getattr(config, name) for name in _SIZES}
        if any(not isinstance(size, int) or size < 1 for size in sizes.values()):
            raise ValueError(f"these sizes are of no model: {sizes}; correct its config.json")
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(f"hidden_size {config.hidden_size} is no multiple of {config.num_attention_heads} heads")
        if config.activation_function != "relu":
            raise ValueError(
                f"contextual sparsity relies on ReLU's exact zeros, this model has activation_function="
                f"{config.activation_function!r}; use a model with 'relu'"
            )

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return model.model.decoder.layers

    def parts(self, layer: nn.Module) -> BlockParts:
        attention = layer.self_attn
        return BlockParts(
            attention_norm=layer.self_attn_layer_norm,
            q=attention.q_proj,
            k=attention.k_proj,
            v=attention.v_proj,
            out=attention.out_proj,
            mlp_norm=layer.final_layer_norm,
            fc1=layer.fc1,
            fc2=layer.fc2,
        )

    def head_dim(self, config) -> int:
        return config.hidden_size // config.num_attention_heads

    def norm_first(self, config) -> bool:
        return config.do_layer_norm_before

    def embed(self, model: nn.Module, inputs: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        decoder = model.model.decoder
        hidden = inputs if inputs.is_floating_point() else decoder.embed_tokens(inputs)
        if decoder.project_in is not None:
            hidden = decoder.project_in(hidden)
        positions = decoder.embed_positions
        # The table's first two rows belong to no position; a padding token has position -1 and reads the second.
        return hidden + nn.functional.embedding(position_ids + positions.offset, positions.weight)

    def embeddings(self, model: nn.Module) -> Embeddings | None:
        decoder = model.model.decoder
        if decoder.project_in is not None:
            return None
        positions = decoder.embed_positions
        return Embeddings(decoder.embed_tokens.weight, positions.weight, positions.offset)

    def final_norm(self, model: nn.Module) -> nn.LayerNorm | None:
        # None in a post-norm OPT, whose last block ends with a norm, and in some pre-norm ones of early fine-tunings.
        return model.model.decoder.final_layer_norm

    def head(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        decoder = model.model.decoder
        if decoder.project_out is not None:
            x = decoder.project_out(x)
        return model.lm_head(x)
