"""The module that replaces a decoder layer."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.cache_utils import Cache

from dejavu_ds.attention import Keep, SparseAttention
from dejavu_ds.cache import DejaVuCache, LayerCache, LayerShape
from dejavu_ds.collectives import TensorParallel
from dejavu_ds.injection_policies import Policy
from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.dense import Weight
from dejavu_ds.kernels.ops import Ops
from dejavu_ds.mlp import SparseMLP, frozen
from dejavu_ds.selection import Listeners, Selector, selects


class SparseBlock(nn.Module):
    """A decoder layer, pre-norm or post-norm, whose decode step reads only the selected heads and neurons.

    Life: built around a Hugging Face layer, whose children it takes over under their own names, so that DeepSpeed
    finds and shards them (and fills them from a checkpoint); `pack` then turns the shards into the gather layout and
    lets the originals go; `attach` gives it selectors.

    Three ways through it:
        forward  Hugging Face's contract, with its caches: dense
        prefill  S tokens into our cache: dense
        decode   one token a sequence: sparse where selectors are attached
    """

    def __init__(
        self, layer: nn.Module, layer_idx: int, policy: Policy, head_dim: int, norm_first: bool = True
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        """Whether the norms are before their units; otherwise they are after, over the sum."""
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self._policy = policy
        for name, child in layer.named_children():
            self.add_module(name, child)

    def pack(self, ops: Ops, tp: TensorParallel, store: Callable[[torch.Tensor], Weight] = frozen) -> None:
        """Turn this rank's shards into the gather layout, the only copy from here on.

        store  what becomes of a weight in that layout, which may be a view; `ops` takes it
        """
        parts = self._policy.parts(self)
        attention = SparseAttention(parts, self.layer_idx, self.head_dim, ops, tp, store)
        mlp = SparseMLP(parts.fc1, parts.fc2, ops, tp, store)
        for name, _ in list(self.named_children()):
            delattr(self, name)
        # DeepSpeed's layers and their parameters hold one another: without this they would keep the originals' memory
        # until Python collects garbage.
        for linear in (parts.q, parts.k, parts.v, parts.out, parts.fc1, parts.fc2):
            for parameter in linear.parameters():
                parameter.data = parameter.data.new_empty(0)
        self.attention_norm, self.attention = parts.attention_norm, attention
        self.mlp_norm, self.mlp = parts.mlp_norm, mlp
        self.at_attention = Listeners()
        """Selectors, of this layer or the next, that listen to the attention's input."""
        self.at_mlp = Listeners()
        """Selectors that listen to the MLP's input."""
        self._window = 0

    def attach(
        self,
        heads: Selector | None,
        mlp: Selector | None,
        masked: bool,
        window: int,
        recovery_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        """Make a unit sparse, by a selector of this layer's own units; None leaves it dense.

        On the recovery stream missing keys and values are computed beside the new ones; None: before them.
        """
        self.attention.selector, self.mlp.selector = heads, mlp
        self.attention.masked = masked and heads is not None
        self.mlp.masked = masked and mlp is not None
        # Masked attention computes every head's K/V at every step, so it misses none.
        self._window = 0 if heads is None or masked else window
        self.attention.recovery_stream = recovery_stream

    def is_dense(self, cache: DejaVuCache) -> bool:
        """Whether nothing is selected in this layer for a step in that cache."""
        return not (selects(self.attention.selector, cache) or selects(self.mlp.selector, cache))

    def cache_shape(self) -> LayerShape:
        """What this layer needs of a cache."""
        return LayerShape(self.attention.heads, self.head_dim, self._window)

    def prefill(
        self,
        hidden: torch.Tensor,
        layer: LayerCache,
        cache: DejaVuCache,
        mask: torch.Tensor | None,
        keep: "PerToken | None" = None,
    ) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]; `keep` masks heads and neurons at every position, for evaluation."""
        x = self.unit_input(self.attention_norm, hidden)
        keep_heads = keep_neurons = None
        if keep is not None:
            keep.tap(self.at_attention.selectors, x)
            keep_heads = keep.of(self.attention.selector)
        hidden = self.added(self.attention_norm, hidden, self.attention.prefill(x, layer, cache, mask, keep_heads))
        x = self.unit_input(self.mlp_norm, hidden)
        if keep is not None:
            keep.tap(self.at_mlp.selectors, x)
            keep_neurons = keep.of(self.mlp.selector)
        return self.added(self.mlp_norm, hidden, self.mlp.prefill(x, keep_neurons))

    def unit_input(self, norm: nn.LayerNorm, hidden: torch.Tensor) -> torch.Tensor:
        """What the unit of `norm` reads of the residual stream [..., D]."""
        return norm(hidden) if self.norm_first else hidden

    def added(self, norm: nn.LayerNorm, hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The residual stream [..., D] after the unit of `norm` has added y."""
        hidden = hidden + y
        return hidden if self.norm_first else norm(hidden)

    def decode(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        layer: LayerCache,
        cache: DejaVuCache,
        norm: Norm | None,
        ring: torch.Tensor | None,
        last: bool,
        ahead: bool,
    ) -> torch.Tensor:
        """One token a sequence.

        Args:
            hidden: [B, D], the residual stream, updated in place; a post-norm block does not use it.
            x: [B, D], this block's input: the norm of `hidden`, or in a post-norm model the stream itself.
            norm: of the next block's attention, or of the head; a post-norm block uses its own.
            ring, last: of the next block's attention, or of the head; see `SparseMLP.decode`.
            ahead: nothing is selected in this step; see there.

        Returns:
            [B, D], the next block's input.
        """
        after_attention = self.mlp_norm
        if not self.norm_first:
            after_attention, norm = self.attention_norm, Norm.of(self.mlp_norm)
            # The sum is made in place, and selectors may still be reading x on a stream of their own.
            hidden = x.clone()
        # Starts the predictors that listen here, of this block or the next; attention.decode and mlp.decode join them.
        self.at_attention.begin(x, cache)
        x = self.attention.decode(x, hidden, layer, cache, Norm.of(after_attention), ahead)
        self.at_mlp.begin(x, cache)
        return self.mlp.decode(x, hidden if self.norm_first else x.clone(), cache, norm, ring, last, ahead)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Hugging Face's contract, dense: [B, S, D] -> [B, S, D].

        The cache comes as `past_key_values` up to transformers 5.23 or so and as `cache` after; one under yet another
        name is refused rather than lost.
        """
        strangers = [name for name, value in kwargs.items() if isinstance(value, Cache)]
        if strangers:
            raise TypeError(f"transformers passes its cache as {strangers}, which this block does not know")
        past = cache if cache is not None else past_key_values
        hidden = hidden_states
        q, k, v = self.attention.project(self.unit_input(self.attention_norm, hidden))
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        hidden = self.added(self.attention_norm, hidden, self.attention.attend(q, k, v, attention_mask))
        return self.added(self.mlp_norm, hidden, self.mlp.prefill(self.unit_input(self.mlp_norm, hidden)))


class PerToken:
    """Every token's own selection, for dense evaluation with zeros; carries a tap's choice to the unit it is for.

    Attributes:
        kept: {selector: units kept, summed over the tokens}; tokens: {selector: tokens seen}.
    """

    def __init__(self) -> None:
        self._keep: dict[Selector, torch.Tensor] = {}
        self.kept: dict[Selector, int] = {}
        self.tokens: dict[Selector, int] = {}

    def tap(self, selectors: list[Selector], x: torch.Tensor) -> None:
        """Let selectors choose from the tap `x` [B, S, D]."""
        for selector in selectors:
            self._keep[selector] = self._choose(selector, x)

    def of(self, selector: Selector | None) -> Keep | None:
        """[B, S, N] bool for a unit's own selector, or a function of the unit's outputs; None for a dense unit."""
        if selector is None:
            return None
        return partial(self._choose, selector) if selector.of_outputs else self._keep.pop(selector)

    def _choose(self, selector: Selector, x: torch.Tensor) -> torch.Tensor:
        keep = selector.keep(x)
        self.kept[selector] = self.kept.get(selector, 0) + int(keep.sum())
        self.tokens[selector] = self.tokens.get(selector, 0) + keep.shape[:-1].numel()
        return keep
