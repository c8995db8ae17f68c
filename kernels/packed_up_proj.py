"""Gathered up-projection over 4-bit rows: y = x @ w[rows].T + b[rows], optionally with ReLU.

`gather_up_proj` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [N * group, D] is packed and
its rows are decoded on the way; see `packed_weight` for the layout. Products are of the decoded elements, rounded to
the dtype of x.
"""

import torch
import torch.nn.functional as F

from dejavu_ds.kernels.packed_weight import PackedWeight, rows_of


def packed_up_proj_ref(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    relu: bool = False,
) -> torch.Tensor:
    """In plain torch, rounded where torch rounds; the way on a CPU."""
    y = torch.empty(x.shape[0], idx.numel() * group, device=x.device, dtype=x.dtype)
    rows = rows_of(idx[: int(count)], group)
    for part in w.row_tiles(rows.numel()):
        bias = None if b is None else b[rows[part]]
        y[:, part] = F.linear(x, w.rows(rows[part]), bias)
    if relu:
        y[:, : rows.numel()].relu_()
    return y
