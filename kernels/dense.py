"""Products with every row of a weight, in 16 bit or packed: what prefill and masked steps compute.

    linear   y[..., n] = x[..., :] . w[n] + b[n]        fc1, and query, key and value
    times    y[..., :] = sum over n of h[..., n] * w[n]  fc2 and the output projection, stored transposed

A packed weight is decoded a tile at a time and never kept in another form. The sums run over whole rows or over all
rows, so a result is what the decoded weight would give, rounded where torch rounds.
"""

import torch
import torch.nn.functional as F

from dejavu_ds.kernels.packed_weight import PackedWeight, decode

Weight = torch.Tensor | PackedWeight


def linear(x: torch.Tensor, w: Weight, b: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., D] times each row of w, whose leading dimensions are taken as one, plus b: [..., rows]."""
    if isinstance(w, PackedWeight):
        return packed_linear_ref(x, w, b)
    return F.linear(x, w.flatten(0, -2), b)


def times(h: torch.Tensor, w: Weight) -> torch.Tensor:
    """h [..., rows] times w [rows, D]: [..., D]."""
    return packed_times_ref(h, w, slice(None)) if isinstance(w, PackedWeight) else h @ w


def as_tensor(w: Weight) -> torch.Tensor:
    """The weight itself, or decoded as a whole: for statistics, not for a step."""
    return w.dequantize() if isinstance(w, PackedWeight) else w


def packed_linear_ref(x: torch.Tensor, w: PackedWeight, b: torch.Tensor | None) -> torch.Tensor:
    """`linear` of a packed weight in plain torch."""
    rows = w.shape[:-1].numel()
    y = torch.empty(*x.shape[:-1], rows, device=x.device, dtype=x.dtype)
    for part in w.row_tiles(rows):
        y[..., part] = F.linear(x, w.rows(part), None if b is None else b[part])
    return y


def packed_times_ref(h: torch.Tensor, w: PackedWeight, rows: torch.Tensor | slice) -> torch.Tensor:
    """h [..., n] times rows [n] of a packed weight in plain torch, [..., D]; each tile has all of these rows."""
    packed, absmax = w.gather(rows)
    y = torch.empty(*h.shape[:-1], w.shape[-1], device=h.device, dtype=h.dtype)
    for part in w.column_tiles(packed.shape[0]):
        bytes_ = packed[:, part.start // 2 : part.stop // 2]
        scales = absmax[:, part.start // w.blocksize : part.stop // w.blocksize]
        y[..., part] = h @ decode(bytes_, scales, w.code, w.dtype)
    return y
