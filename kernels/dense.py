"""Products with every row of a weight, in 16 bit or packed: what prefill and masked steps compute.

    linear   y[..., n] = x[..., :] . w[n] + b[n]        fc1, and query, key and value
    times    y[..., :] = sum over n of h[..., n] * w[n]  fc2 and the output projection, stored transposed

A packed weight is decoded a tile at a time and never kept in another form. The sums run over whole rows or over all
rows, so a result is what the decoded weight would give, rounded where torch rounds.
"""

import torch
import torch.nn.functional as F

from dejavu_ds.kernels import few_tokens
from dejavu_ds.kernels.packed_rows import packed_tile
from dejavu_ds.kernels.packed_weight import PackedWeight, decode

Weight = torch.Tensor | PackedWeight


def linear(x: torch.Tensor, w: Weight, b: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., D] times each row of w, whose leading dimensions are taken as one, plus b: [..., rows]."""
    if isinstance(w, PackedWeight):
        return _packed_linear(x, w, b)
    return few_tokens.linear(x, w.flatten(0, -2), b)


def times(h: torch.Tensor, w: Weight) -> torch.Tensor:
    """h [..., rows] times w [rows, D]: [..., D]."""
    if not isinstance(w, PackedWeight):
        return few_tokens.times(h, w)
    return _packed_times(h, w) if h.is_cuda else packed_times_ref(h, w, slice(None))


def as_tensor(w: Weight) -> torch.Tensor:
    """The weight itself, or decoded as a whole: for statistics, not for a step."""
    return w.dequantize() if isinstance(w, PackedWeight) else w


def _packed_linear(x: torch.Tensor, w: PackedWeight, b: torch.Tensor | None) -> torch.Tensor:
    """`linear` of a packed weight, decoded a few rows at a time."""
    rows = w.shape[:-1].numel()
    y = torch.empty(*x.shape[:-1], rows, device=x.device, dtype=x.dtype)
    for part in w.row_tiles(rows):
        tile = packed_tile(w, part, slice(0, w.shape[-1])) if x.is_cuda else w.rows(part)
        y[..., part] = F.linear(x, tile, None if b is None else b[part])
    return y


def _packed_times(h: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    """`times` of a packed weight on a GPU, decoded a few columns at a time."""
    y = torch.empty(*h.shape[:-1], w.shape[-1], device=h.device, dtype=h.dtype)
    for part in w.column_tiles(w.shape[0]):
        y[..., part] = h @ packed_tile(w, slice(0, w.shape[0]), part)
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
