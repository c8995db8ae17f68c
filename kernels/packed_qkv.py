"""Query, key and value of the kept heads over 4-bit rows.

`gather_qkv` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [H, 3, head_dim, D] is packed and
its rows are decoded on the way; see `packed_weight` for the layout and `packed_up_proj` for what is rounded.

A head is 3 * head_dim consecutive rows, so this is the up-projection of such units.
"""

import torch

from dejavu_ds.kernels.configs import Config, config_for
from dejavu_ds.kernels.gather_qkv import check_qkv
from dejavu_ds.kernels.packed_up_proj import packed_up_proj_ref, packed_up_rows
from dejavu_ds.kernels.packed_weight import PackedWeight


def packed_qkv_ref(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """In plain torch, rounded where torch rounds; the way on a CPU."""
    head_dim = w.shape[2]
    bias = None if b is None else b.flatten()
    qkv = packed_up_proj_ref(x, w, bias, idx, count, group=3 * head_dim)
    return qkv.view(x.shape[0], idx.numel(), 3, head_dim)


def packed_qkv(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    config: Config | None = None,
) -> torch.Tensor:
    """Return qkv of the kept heads, as `gather_qkv` does.

    Each kept row of `w` is read once for every 16 tokens. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    check_qkv(x, w, b, idx, count)
    head_dim, cap = w.shape[2], idx.numel()
    c = config or config_for("packed_qkv", x.shape[0], x.shape[1], x.dtype)
    return packed_up_rows(x, w, b, idx, count, 3 * head_dim, False, c).view(-1, cap, 3, head_dim)
