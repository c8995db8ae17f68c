"""Gathered up-projection over 4-bit rows: y = x @ w[rows].T + b[rows], optionally with ReLU.

`gather_up_proj` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [N * group, D] is packed and
its rows are decoded on the way; see `packed_weight` for the layout and `nibbles` for the decoding.

The twin multiplies decoded elements, rounded to the dtype of x. The kernel multiplies x by the table's values and the
sum by the scale, in fp32; for 16-bit activations the table is rounded to fp16, with tensor cores to the dtype of x.
With `half` in its configuration up to 16 products are added in fp16, which suits inputs that a norm has bounded.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config, config_for
from dejavu_ds.kernels.gather_up_proj import check_gather
from dejavu_ds.kernels.nibbles import load_table, lookup_of, offset_of
from dejavu_ds.kernels.packed_products import packed_rows_dot, packed_rows_times_tokens, stack
from dejavu_ds.kernels.packed_weight import PackedWeight, rows_of
from dejavu_ds.kernels.tiles import await_inputs, launch_options


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


@triton.jit
def units_of(idx_ptr, first, cap, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr):
    """The units of rows first .. first + BLOCK_N - 1, as a tuple: with DOT of one tensor, else of BLOCK_N numbers."""
    if DOT:
        slot = (first + tl.arange(0, BLOCK_N)) // GROUP
        units = (tl.load(idx_ptr + tl.minimum(slot, cap - 1)),)
    else:
        units = ()
        for r in tl.static_range(BLOCK_N):
            units = units + (tl.load(idx_ptr + tl.minimum((first + r) // GROUP, cap - 1)),)
    return units


class Caches(NamedTuple):
    """Where the rows of a head that are keys and values go; as in `gather_qkv`."""

    k: torch.Tensor
    v: torch.Tensor
    position: torch.Tensor
    watermark: torch.Tensor | None


@triton.jit
def _store_qkv(
    y, q_ptr, k_ptr, v_ptr, token, mask_b, offs_n, head, ours, t, cap, H, T,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """y [BLOCK_B, BLOCK_N], places offs_n of the list's heads' rows: queries in the list's order, the rest by head."""
    part = offs_n % GROUP // HEAD_DIM
    offs_r = offs_n % HEAD_DIM
    mask = mask_b[:, None] & ours[None, :]
    q_ptrs = q_ptr + (token[:, None] * cap + offs_n[None, :] // GROUP) * HEAD_DIM + offs_r[None, :]
    tl.store(q_ptrs, y, mask=mask & (part == 0)[None, :])
    place = ((token[:, None] * H + head[None, :]) * T + t) * HEAD_DIM + offs_r[None, :]
    tl.store(k_ptr + place, y, mask=mask & (part == 1)[None, :])
    tl.store(v_ptr + place, y, mask=mask & (part == 2)[None, :])


# B and the capacities are not specialised: another batch must not compile again.
@triton.jit(do_not_specialize=["B", "stride_y_b", "H", "T"])
def _packed_up_proj_kernel(
    x_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table_ptr,
    b_ptr, idx_ptr, count_ptr, y_ptr, k_ptr, v_ptr, position_ptr, watermark_ptr,
    B, stride_y_b, H, T,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    HALF: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    BYTES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    rows = tl.load(count_ptr) * GROUP
    offset = offset_of(absmax_offset_ptr)
    if DOT:
        table = load_table(table_ptr, tl.arange(0, BLOCKSIZE // 2)[None, :], BYTES)
    else:
        table = load_table(table_ptr, tl.arange(0, BLOCK_D // 16), PAIRS)
    # The units of a block are asked for a block ahead, the first ones' at the same time as the count.
    cap = stride_y_b // GROUP
    next_units = units_of(idx_ptr, tl.program_id(0) * BLOCK_N, cap, GROUP, BLOCK_N, DOT)
    first_b = tl.program_id(1).to(tl.int64) * BLOCK_B
    token = first_b + tl.arange(0, BLOCK_B)
    mask_b = token < B

    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_N), tl.num_programs(0)):
        first = block * BLOCK_N
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < rows
        units = next_units
        next_units = units_of(idx_ptr, first + tl.num_programs(0) * BLOCK_N, cap, GROUP, BLOCK_N, DOT)
        unit_n = tl.where(mask_n, units[0] if DOT else stack(units, BLOCK_N), 0)
        ours = mask_n
        if watermark_ptr is not None:
            of_now = tl.load(watermark_ptr + unit_n) >= tl.load(position_ptr)
            ours = mask_n & (of_now | (offs_n % GROUP < HEAD_DIM))
        if tl.max(ours.to(tl.int32), axis=0) > 0:
            if DOT:
                row = unit_n.to(tl.int64) * GROUP + offs_n % GROUP
                y = packed_rows_dot(
                    x_ptr, token, mask_b, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, row,
                    ours, D, BLOCKSIZE, BLOCK_B, BLOCK_N, STAGES, BYTES,
                )  # fmt: skip
                bias_row = row
            else:
                rows_of_block = ()
                for r in tl.static_range(BLOCK_N):
                    # Beyond the count the first row stands in: it is there, and in the cache.
                    place, unit = first, units[0]
                    if r > 0:
                        place = tl.where(first + r < rows, first + r, first)
                        unit = tl.where(first + r < rows, units[r], units[0])
                    rows_of_block = rows_of_block + (unit * GROUP + place % GROUP,)
                y = packed_rows_times_tokens(
                    x_ptr, first_b, B, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table,
                    rows_of_block, D, BLOCKSIZE, BLOCK_B, BLOCK_N, BLOCK_D, HALF, PAIRS,
                )  # fmt: skip
                bias_row = stack(rows_of_block, BLOCK_N)
            if b_ptr is not None:
                y += tl.load(b_ptr + bias_row, mask=mask_n, other=0.0).to(tl.float32)[None, :]
            if RELU:
                y = tl.where(y < 0.0, 0.0, y)  # not maximum(): a NaN must stay one
            y = y.to(y_ptr.dtype.element_ty)
            if HEAD_DIM > 0:
                t = tl.load(position_ptr)
                _store_qkv(y, y_ptr, k_ptr, v_ptr, token, mask_b, offs_n, unit_n, ours, t, cap, H, T, GROUP, HEAD_DIM)
            else:
                y_ptrs = y_ptr + token[:, None] * stride_y_b + offs_n[None, :]
                tl.store(y_ptrs, y, mask=mask_b[:, None] & mask_n[None, :])


def packed_up_proj(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    relu: bool = False,
    config: Config | None = None,
) -> torch.Tensor:
    """Return x @ w[rows].T + b[rows] for the rows of the kept units, as `gather_up_proj` does.

    Each kept row of `w` is read once for every 16 tokens. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, a `group` that does not divide the rows, or tensors that are not contiguous.
        TypeError: x, w and b of different dtypes, or idx or count not int32.
    """
    if x.dim() != 2 or len(w.shape) != 2 or w.shape[1] != x.shape[1]:
        raise ValueError(f"expected x [B, D] and w [rows, D] with one D, got {tuple(x.shape)} and {tuple(w.shape)}")
    check_gather(idx, count, w, group)
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"b must be [{w.shape[0]}], got {tuple(b.shape)}")
    if x.dtype != w.dtype or (b is not None and b.dtype != x.dtype):
        raise TypeError(f"x, w and b must share one dtype, got {x.dtype}, {w.dtype}, {None if b is None else b.dtype}")
    if not all(t.is_contiguous() for t in (x, idx) + (() if b is None else (b,))):
        raise ValueError("x, b and idx must be contiguous; call .contiguous() once at load time, not per step")

    c = config or config_for("packed_up_proj", x.shape[0], x.shape[1], x.dtype)
    return packed_up_rows(x, w, b, idx, count, group, relu, c)


def packed_up_rows(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int,
    relu: bool,
    c: Config,
    caches: Caches | None = None,
) -> torch.Tensor:
    """`packed_up_proj` of what is checked already, for a weight and a bias of any leading dimensions.

    With `caches` units are heads, and the result is q [B, cap, head_dim].
    """
    (B, D), rows_cap = x.shape, idx.numel() * group
    head_dim = 0 if caches is None else group // 3
    shape = (B, rows_cap) if caches is None else (B, idx.numel(), head_dim)
    y = torch.empty(shape, device=x.device, dtype=x.dtype)
    lookup = lookup_of(w, x.dtype)
    grid = (min(triton.cdiv(rows_cap, c.block_n), c.programs), triton.cdiv(B, c.block_b))
    _packed_up_proj_kernel[grid](
        x, *w.pointers(), lookup.table, b, idx, count, y, *(caches or (None,) * 4),
        B, rows_cap, *((0, 0) if caches is None else caches.k.shape[1:3]),
        D=D,
        BLOCKSIZE=w.blocksize,
        GROUP=group,
        HEAD_DIM=head_dim,
        RELU=relu,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        DOT=c.dot,
        HALF=c.half and lookup.pairs != "" and x.dtype == torch.float16,
        STAGES=c.stages,
        PAIRS=lookup.pairs,
        BYTES=lookup.bytes,
        num_warps=c.warps,
        **launch_options(),
    )  # fmt: skip
    return y
