"""Recovery of missing keys and values over 4-bit rows.

`recover_kv` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [H, 3, head_dim, D] is packed and
its rows are decoded on the way; see `packed_weight` for the layout.
"""

import torch
import torch.nn.functional as F

from dejavu_ds.kernels.packed_weight import PackedWeight


def packed_recover_kv_ref(
    inputs: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    selected: torch.Tensor,
    watermark: torch.Tensor,
    position: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    window: int,
) -> None:
    """In plain torch, rounded where torch rounds; the way on a CPU."""
    t, head_dim = int(position), w.shape[2]
    missing = t - watermark
    due = (selected & (missing > 0)) | (missing >= window)
    for head in due.nonzero().flatten().tolist():
        first = int(watermark[head])
        x = inputs[:, torch.arange(first, t + 1, device=inputs.device) % inputs.shape[1]]  # [B, missing + 1, D]
        for cache, part in ((k_cache, 1), (v_cache, 2)):
            start = (head * 3 + part) * head_dim
            rows = w.rows(slice(start, start + head_dim))
            cache[:, head, first : t + 1] = F.linear(x, rows, None if b is None else b[head, part])
