"""Query, key and value of the kept heads over 4-bit rows.

`gather_qkv` for a `PackedWeight`: the same arguments, shapes, meaning and side effect, but that w [H, 3, head_dim, D]
is packed and its rows are decoded on the way; see `packed_weight` for the layout.
"""

import torch

from dejavu_ds.kernels.gather_qkv import store_kv
from dejavu_ds.kernels.packed_up_proj import packed_up_proj_ref
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
) -> torch.Tensor:
    """In plain torch, rounded where torch rounds; the way on a CPU."""
    bias = None if b is None else b.flatten()
    qkv = packed_up_proj_ref(x, w, bias, idx, count, group=3 * w.shape[2])
    return store_kv(qkv.view(x.shape[0], -1, 3, w.shape[2]), idx[: int(count)], k_cache, v_cache, position, watermark)
