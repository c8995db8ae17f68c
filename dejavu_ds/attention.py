"""The attention of a block: every head, or the selected heads with the missing keys and values made up."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from dejavu_ds.cache import DejaVuCache, LayerCache
from dejavu_ds.collectives import TensorParallel
from dejavu_ds.injection_policies import BlockParts
from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.dense import Weight, linear, times
from dejavu_ds.kernels.ops import Ops
from dejavu_ds.mlp import frozen
from dejavu_ds.selection import Selection, Selector, selects

# For so many pairs of sequence and head; a larger batch makes its own at every step.
_TICKETS = 4096

Keep = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


class SparseAttention(nn.Module):
    """Causal self-attention over the H heads of this rank.

    Storage makes one head contiguous everywhere; prefill and decode read the same copy.
        qkv  [H, 3, head_dim, D], qkv_bias [H, 3, head_dim] or None
        out  [H * head_dim, D], out_bias [D] or None                    transposed
    qkv and out are what `store` makes of them, parameters or in 4 bits, and `ops` takes those. The number of heads is
    read from the weights, so DeepSpeed may shard them as it likes, in whole heads.
    """

    def __init__(
        self,
        parts: BlockParts,
        layer_idx: int,
        head_dim: int,
        ops: Ops,
        tp: TensorParallel,
        store: Callable[[torch.Tensor], Weight],
    ) -> None:
        super().__init__()
        self._layer_idx = layer_idx
        self.head_dim = head_dim
        self.heads = parts.q.weight.shape[0] // head_dim
        projections = (parts.q, parts.k, parts.v)
        by_head = [p.weight.detach().view(self.heads, 1, head_dim, -1) for p in projections]
        self.qkv = store(torch.cat(by_head, dim=1))
        self.qkv_bias = None
        if parts.q.bias is not None:
            biases = [p.bias.detach().view(self.heads, 1, head_dim) for p in projections]
            self.qkv_bias = frozen(torch.cat(biases, dim=1))
        self.out = store(parts.out.weight.detach().t())
        self.out_bias = frozen(parts.out.bias)
        self.selector: Selector | None = None
        self.masked = False
        self.recovery_stream: torch.cuda.Stream | None = None
        self._scale = head_dim**-0.5
        self._ops = ops
        self._tp = tp
        self._every_head = Selection.all_of(self.heads, self.qkv.device)
        self._tickets = torch.zeros(_TICKETS, dtype=torch.int32, device=self.qkv.device)
        self.recovered_total = torch.zeros(1, dtype=torch.int64, device=self.qkv.device)
        """Heads whose K/V were computed in decode steps though they were not selected, since the last reset."""

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every head's query, key and value of [B, S, D], each [B, H, S, head_dim]."""
        return self._qkv_dense(x).permute(3, 0, 2, 1, 4).unbind(0)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        keep: Keep | None = None,
    ) -> torch.Tensor:
        """Attention and output projection.

        Args:
            q: [B, H, S, head_dim]; k, v: [B, H, L, head_dim].
            mask: broadcastable to [B, 1, S, L], bool (True: attend) or additive; None: causal, which needs S == L or
                S == 1.
            keep: [B, S, H] bool, heads to keep token by token, or a function that tells them from the heads' outputs
                [B, S, H, head_dim]; None: all.

        Returns:
            [B, S, D]
        """
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1)
        o = o.transpose(1, 2)
        if keep is not None:
            o = o * (keep(o) if callable(keep) else keep)[..., None]
        return self._finish(times(o.reshape(*o.shape[:2], -1), self.out))

    def prefill(
        self,
        x: torch.Tensor,
        layer: LayerCache,
        cache: DejaVuCache,
        mask: torch.Tensor | None,
        keep: Keep | None = None,
    ) -> torch.Tensor:
        """Dense over the next S tokens, [B, S, D] -> [B, S, D]; fills the cache.

        Args:
            mask: as in `attend`, over the cache's slots up to and with these tokens.
            keep: as in `attend`.
        """
        start, stop = cache.length, cache.length + x.shape[1]
        if layer.watermark is not None:
            if start:
                self._recover(layer, cache, self._every_head.mask)
            layer.watermark.fill_(stop)
        q, k, v = self.project(x)
        layer.k[:, :, start:stop] = k
        layer.v[:, :, start:stop] = v
        return self.attend(q, layer.k[:, :, :stop], layer.v[:, :, :stop], mask, keep)

    def decode(
        self, x: torch.Tensor, hidden: torch.Tensor, layer: LayerCache, cache: DejaVuCache, norm: Norm, ahead: bool
    ) -> torch.Tensor:
        """One token a sequence; fills the cache.

        Args:
            x: [B, D], the normalised input, which is in the ring of kept inputs already.
            hidden: [B, D], the residual stream; the result is added in place.
            norm: of the MLP.
            ahead: nothing is selected in this step, so weights may be loaded while the launch before runs.

        Returns:
            [B, D], the MLP's normalised input.
        """
        selection = self._selection(x, layer, cache)
        if self.masked:
            o = self._attend_one(x, layer, cache, self._every_head, ahead) * selection.mask[:, None]
            y = times(o.flatten(1), self.out)
        else:
            o = self._attend_one(x, layer, cache, selection, ahead)
            idx, count, _ = selection
            y = self._ops.gather_down_proj(
                o.flatten(1),
                self.out,
                idx,
                count,
                group=self.head_dim,
                out=self._tp.partial(*x.shape, x.device),
            )
        return self._ops.add_norm(self._tp.sum_partial(y), self.out_bias, hidden, norm, lets_in=ahead)

    def _selection(self, x: torch.Tensor, layer: LayerCache, cache: DejaVuCache) -> Selection:
        """The step's heads; for a selector that goes by true outputs every head is computed first, on a copy."""
        if not selects(self.selector, cache):
            return self._every_head
        if self.selector.of_outputs:
            self.selector.begin(self._every_output(x, layer, cache), cache)
        return self.selector.join()

    def _every_output(self, x: torch.Tensor, layer: LayerCache, cache: DejaVuCache) -> torch.Tensor:
        """What each head would give, [B, D] -> [B, H, head_dim]; the cache stays as it is."""
        layer = layer.copy()
        if layer.watermark is not None:
            self._recover(layer, cache, self._every_head.mask)
            layer.watermark.copy_(cache.position)
        return self._attend_one(x, layer, cache, self._every_head)

    def _attend_one(
        self, x: torch.Tensor, layer: LayerCache, cache: DejaVuCache, selection: Selection, ahead: bool = False
    ) -> torch.Tensor:
        """Outputs of the selected heads for one token a sequence, [B, D] -> [B, H, head_dim].

        ahead: as in `decode`.
        """
        idx, count, mask = selection
        moved = {}
        if layer.watermark is not None:
            moved = {
                "mask": mask,
                "watermark": layer.watermark,
                "window": layer.window,
                "recovered_total": self.recovered_total,
            }
            self._start_recovery(layer, cache, mask)
        q = self._ops.gather_qkv(
            x, self.qkv, self.qkv_bias, idx, count, layer.k, layer.v, cache.position, layer.watermark, ahead=ahead
        )
        if layer.watermark is not None and self.recovery_stream is not None:
            torch.cuda.current_stream().wait_stream(self.recovery_stream)
        return self._ops.decode_attention(
            q, layer.k, layer.v, idx, count, cache.position, cache.key_mask, self._scale,
            tickets=self._tickets, **moved,
        )  # fmt: skip

    def _qkv_dense(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., H, 3, head_dim]"""
        bias = None if self.qkv_bias is None else self.qkv_bias.flatten()
        return linear(x, self.qkv, bias).unflatten(-1, (self.heads, 3, self.head_dim))

    def _start_recovery(self, layer: LayerCache, cache: DejaVuCache, selected: torch.Tensor) -> None:
        """Compute what is missing, beside the projections of the heads that miss nothing."""
        if self.recovery_stream is None:
            self._recover(layer, cache, selected)
            return
        self.recovery_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.recovery_stream):
            self._recover(layer, cache, selected)

    def _recover(self, layer: LayerCache, cache: DejaVuCache, selected: torch.Tensor) -> None:
        """Compute the K/V that the selected heads, and those idle for the whole window, have missed."""
        self._ops.recover_kv(
            layer.inputs, self.qkv, self.qkv_bias, selected, layer.watermark, cache.position, layer.k, layer.v,
            window=layer.window,
        )  # fmt: skip

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        y = self._tp.all_reduce(y)
        return y if self.out_bias is None else y + self.out_bias
