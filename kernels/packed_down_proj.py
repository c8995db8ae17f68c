"""Gathered down-projection over 4-bit rows: y = sum over the kept rows n of h[:, n] * w[n].

`gather_down_proj` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [N * group, D], stored
transposed, is packed and its rows are decoded on the way; see `packed_weight` for the layout. Products are with the
decoded elements, rounded to the dtype of h.
"""

import torch

from dejavu_ds.kernels.dense import packed_times_ref
from dejavu_ds.kernels.packed_weight import PackedWeight, rows_of


def packed_down_proj_ref(
    h: torch.Tensor,
    w: PackedWeight,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """In plain torch, rounded where torch rounds; the way on a CPU. With `skip_zeros` its tile is the whole batch."""
    rows = rows_of(idx[: int(count)], group)
    h = h[:, : rows.numel()]
    if skip_zeros:
        columns = (h != 0).any(dim=0).nonzero().squeeze(1)
        h, rows = h.index_select(1, columns), rows.index_select(0, columns)
    y = packed_times_ref(h, w, rows)
    return y.float()[None] if out is None else out.copy_(y)[None]
