"""Query, key and value of the kept heads over 4-bit rows.

`gather_qkv` for a `PackedWeight`: the same arguments, shapes, meaning and side effect, but that w [H, 3, head_dim, D]
is packed and its rows are decoded on the way; see `packed_weight` for the layout and `packed_up_proj` for what is
rounded.

A head is 3 * head_dim consecutive rows, so this is the up-projection of such units, but for where results go.
"""

import torch

from dejavu_ds.kernels.configs import Config, config_for
from dejavu_ds.kernels.gather_qkv import check_qkv, store_kv
from dejavu_ds.kernels.packed_up_proj import Caches, packed_up_proj_ref, packed_up_rows
from dejavu_ds.kernels.packed_weight import PackedWeight


def packed_qkv_ref(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor,
    watermark: torch.Tensor | None = None,
    ahead: bool = False,
) -> torch.Tensor:
    """In plain torch, rounded where torch rounds; the way on a CPU."""
    bias = None if b is None else b.flatten()
    qkv = packed_up_proj_ref(x, w, bias, idx, count, group=3 * w.shape[2])
    return store_kv(qkv.view(x.shape[0], -1, 3, w.shape[2]), idx[: int(count)], k_cache, v_cache, position, watermark)


def packed_qkv(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor,
    watermark: torch.Tensor | None = None,
    config: Config | None = None,
    ahead: bool = False,
) -> torch.Tensor:
    """Return q of the kept heads, and store k and v of those that have missed nothing, as `gather_qkv` does.

    Each kept row of `w` is read once for every 16 tokens. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    check_qkv(x, w, b, idx, count, k_cache, v_cache, position, watermark)
    c = config or config_for("packed_qkv", x.shape[0], x.shape[1], x.dtype)
    caches = Caches(k_cache, v_cache, position, watermark)
    return packed_up_rows(x, w, b, idx, count, 3 * w.shape[2], False, c, ahead, caches)
