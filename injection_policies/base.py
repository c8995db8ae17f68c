"""What a policy says about a model family; the registry is in `dejavu_ds.injection_policies`."""

from typing import NamedTuple, Protocol

import torch
from torch import nn


class BlockParts(NamedTuple):
    """The modules of one decoder layer, under names that hold for every family.

    `q`, `k`, `v`, `fc1` split by output row under tensor parallelism, `out` and `fc2` by input column. The norms stand
    before their units or after them, as the policy's `norm_first` says.
    """

    attention_norm: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    out: nn.Module
    mlp_norm: nn.Module
    fc1: nn.Module
    fc2: nn.Module


class Embeddings(NamedTuple):
    """Tables whose rows are added: one by the token, one by its position plus `offset`. [V, D] and [P, D]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    offset: int


class Policy(Protocol):
    """One model family: which layer is replaced, where its tensors are, what is row-parallel."""

    model_type: str
    row_parallel: tuple[str, ...]
    """Names DeepSpeed gets in its injection policy: the linears whose outputs are summed over the ranks."""

    def check(self, config) -> None:
        """Raise ValueError for a configuration of the family that the sparse block cannot run."""

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers, in order; replaced in place by the injection."""

    def parts(self, layer: nn.Module) -> BlockParts:
        """The modules of one layer, of Hugging Face's or of ours before packing."""

    def head_dim(self, config) -> int: ...

    def norm_first(self, config) -> bool:
        """Whether a unit reads a norm of the residual stream and adds to the stream (pre-norm), or reads the stream
        itself and the norm is of the sum, which is the stream from there on (post-norm)."""

    def embed(self, model: nn.Module, inputs: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[B, S] ids or [B, S, D] embeddings and [B, S] positions (0 for a sequence's first token) -> [B, S, D]."""

    def embeddings(self, model: nn.Module) -> Embeddings | None:
        """What `embed` looks up, if that is all it does with ids."""

    def final_norm(self, model: nn.Module) -> nn.LayerNorm | None:
        """The norm between the last block and the head, where the model has one."""

    def head(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What follows the final norm: [..., D] -> logits [..., V]."""
