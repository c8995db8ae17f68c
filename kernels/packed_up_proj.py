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

from dejavu_ds.kernels.configs import Config, config_for, most_programs, most_registers
from dejavu_ds.kernels.gather_up_proj import check_gather
from dejavu_ds.kernels.nibbles import byte_table, fill_table, lookup_of, offset_of, pass_no_loads, word_table
from dejavu_ds.kernels.packed_products import (
    load_row,
    load_tokens,
    packed_rows_dot,
    stack,
    sum_row,
    sum_threads,
    tokens_from,
)
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
    ahead: bool = False,
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
    """The units of rows first .. first + BLOCK_N - 1, as a tuple: with DOT of one tensor, else of BLOCK_N numbers, or
    of one where a block lies within a unit."""
    if DOT:
        slot = (first + tl.arange(0, BLOCK_N)) // GROUP
        units = (tl.load(idx_ptr + tl.minimum(slot, cap - 1)),)
    else:
        units = ()
        for r in tl.static_range(1 if GROUP % BLOCK_N == 0 else BLOCK_N):
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


@triton.jit
def _bias(b_ptr, unit, offs_n, mask_n, GROUP: tl.constexpr):
    """Of such rows, [1, BLOCK_N] fp32."""
    if b_ptr is None:
        return 0.0
    else:
        row = unit.to(tl.int64) * GROUP + offs_n % GROUP
        return tl.load(b_ptr + row, mask=mask_n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store(
    y, bias, y_ptr, k_ptr, v_ptr, position_ptr, stride_y_b, H, T, token, mask_b, offs_n, mask_n, unit, ours,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Finish y [BLOCK_B, BLOCK_N], places offs_n of the list's rows, of units `unit`, and store it."""
    y += bias
    if RELU:
        y = tl.where(y < 0.0, 0.0, y)  # not maximum(): a NaN must stay one
    y = y.to(y_ptr.dtype.element_ty)
    if HEAD_DIM > 0:
        t = tl.load(position_ptr)
        cap = stride_y_b // GROUP
        _store_qkv(y, y_ptr, k_ptr, v_ptr, token, mask_b, offs_n, unit, ours, t, cap, H, T, GROUP, HEAD_DIM)
    else:
        y_ptrs = y_ptr + token[:, None] * stride_y_b + offs_n[None, :]
        tl.store(y_ptrs, y, mask=mask_b[:, None] & mask_n[None, :])


@triton.jit
def _wanted(
    units, first, kept_rows, watermark_ptr, position_ptr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Whether the rows from place `first` on are computed here, a tuple of 0 or 1, as many as `units_of` gives.

    A block that lies within a head also lies within its queries, keys or values: these are a third of it each, and
    BLOCK_N is a power of 2.
    """
    wanted = ()
    for r in tl.static_range(len(units)):
        place = first + r
        ours = place < kept_rows
        if watermark_ptr is not None:
            # Beyond the count there is no unit's number.
            of_now = tl.load(watermark_ptr + units[r], mask=ours, other=0) >= tl.load(position_ptr)
            ours = ours & (of_now | (place % GROUP < HEAD_DIM))
        wanted = wanted + (ours.to(tl.int32),)
    return wanted


@triton.jit
def _rows_of(units, first, wanted, GROUP: tl.constexpr):
    """Numbers of these rows, int64, as many as `units_of` gives; 0 where it is not wanted."""
    rows = ()
    for r in tl.static_range(len(units)):
        row = tl.where(wanted[r] != 0, units[r] * GROUP + (first + r) % GROUP, 0)
        rows = rows + (row.to(tl.int64),)
    return rows


@triton.jit
def _row(rows, r: tl.constexpr):
    """Row r of a block from `_rows_of`. Rows of one unit follow one another, so their addresses differ by constants."""
    if len(rows) == 1:
        return rows[0] + r
    else:
        return rows[r]


@triton.jit
def _spread(numbers, N: tl.constexpr):
    """A tuple of N numbers, or of one that holds for all, as a tensor [N]."""
    if len(numbers) == 1:
        return tl.zeros((N,), numbers[0].dtype) + numbers[0]
    else:
        return stack(numbers, N)


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
    AWAY: tl.constexpr,
    HALF: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """By multiply-adds.

    Programs walk over the rows. While one is multiplied the words of the AWAY rows after it are on their way, and what
    says where those of the next blocks lie. AHEAD: a program loads its first rows before it waits for what was launched
    before.
    """
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    fill_table(table_ptr, ASM)
    if not AHEAD:
        await_inputs(EARLY)
    table = word_table(table_ptr, tl.arange(0, BLOCK_D // 16), ASM)
    step = tl.num_programs(0) * BLOCK_N
    first = tl.program_id(0) * BLOCK_N
    cap = stride_y_b // GROUP
    # The first units are asked for at the same time as the count.
    units = units_of(idx_ptr, first, cap, GROUP, BLOCK_N, False)
    next_units = units_of(idx_ptr, first + step, cap, GROUP, BLOCK_N, False)
    kept_rows = tl.load(count_ptr) * GROUP
    offset = offset_of(absmax_offset_ptr)
    first_b = tl.program_id(1).to(tl.int64) * BLOCK_B
    token = first_b + tl.arange(0, BLOCK_B)
    if not AHEAD:
        x = load_tokens(x_ptr, tokens_from(first_b, B, BLOCK_B), D, BLOCK_D, ASM)
    wanted = _wanted(units, first, kept_rows, watermark_ptr, position_ptr, GROUP, HEAD_DIM)
    rows = _rows_of(units, first, wanted, GROUP)
    q, absmax = (), ()
    for r in tl.static_range(AWAY):
        more_q, more_absmax = load_row(
            w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, _row(rows, r), D, BLOCKSIZE, BLOCK_D
        )
        q, absmax = q + more_q, absmax + more_absmax
    next_wanted = _wanted(next_units, first + step, kept_rows, watermark_ptr, position_ptr, GROUP, HEAD_DIM)
    if AHEAD:
        await_inputs(EARLY)
        x = load_tokens(x_ptr, tokens_from(first_b, B, BLOCK_B), D, BLOCK_D, ASM)
    for first in range(tl.program_id(0) * BLOCK_N, kept_rows, step):
        after = first + 2 * step
        after_units = units_of(idx_ptr, after, cap, GROUP, BLOCK_N, False)
        next_rows = _rows_of(next_units, first + step, next_wanted, GROUP)
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < kept_rows
        unit = tl.where(mask_n, _spread(units, BLOCK_N), 0)
        bias = _bias(b_ptr, unit, offs_n, mask_n, GROUP)
        sums = ()
        for r in tl.static_range(BLOCK_N):
            # The row that is AWAY rows after it, of this block or the next.
            then = _row(rows, r + AWAY) if r + AWAY < BLOCK_N else _row(next_rows, r + AWAY - BLOCK_N)
            next_q, next_absmax = load_row(
                w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, then, D, BLOCKSIZE, BLOCK_D
            )
            table = pass_no_loads(table, ASM)
            sums = sums + sum_row(q, absmax, x, table, x_ptr.dtype.element_ty, HALF, ASM)
            q, absmax = q[TILES:] + next_q, absmax[TILES:] + next_absmax
        y = sum_threads(sums, BLOCK_B, BLOCK_N)
        ours = _spread(wanted, BLOCK_N) > 0
        _store(
            y, bias, y_ptr, k_ptr, v_ptr, position_ptr, stride_y_b, H, T, token, token < B, offs_n, mask_n, unit,
            ours, GROUP, HEAD_DIM, RELU,
        )  # fmt: skip
        units, wanted, rows, next_units = next_units, next_wanted, next_rows, after_units
        next_wanted = _wanted(next_units, after, kept_rows, watermark_ptr, position_ptr, GROUP, HEAD_DIM)


@triton.jit(do_not_specialize=["B", "stride_y_b", "H", "T"])
def _packed_up_proj_dot_kernel(
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
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """By tensor cores."""
    await_inputs(EARLY)
    kept_rows = tl.load(count_ptr) * GROUP
    offset = offset_of(absmax_offset_ptr)
    table = byte_table(table_ptr, tl.arange(0, BLOCKSIZE // 2)[None, :], ASM)
    # The units of a block are asked for a block ahead, the first ones' at the same time as the count.
    cap = stride_y_b // GROUP
    (next_units,) = units_of(idx_ptr, tl.program_id(0) * BLOCK_N, cap, GROUP, BLOCK_N, True)
    token = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = token < B
    for block in range(tl.program_id(0), tl.cdiv(kept_rows, BLOCK_N), tl.num_programs(0)):
        first = block * BLOCK_N
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < kept_rows
        unit = tl.where(mask_n, next_units, 0)
        (next_units,) = units_of(idx_ptr, first + tl.num_programs(0) * BLOCK_N, cap, GROUP, BLOCK_N, True)
        ours = mask_n
        if watermark_ptr is not None:
            of_now = tl.load(watermark_ptr + unit) >= tl.load(position_ptr)
            ours = mask_n & (of_now | (offs_n % GROUP < HEAD_DIM))
        if tl.max(ours.to(tl.int32), axis=0) > 0:
            row = unit.to(tl.int64) * GROUP + offs_n % GROUP
            y = packed_rows_dot(
                x_ptr, token, mask_b, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, row,
                ours, D, BLOCKSIZE, BLOCK_B, BLOCK_N, STAGES, ASM,
            )  # fmt: skip
            bias = _bias(b_ptr, unit, offs_n, mask_n, GROUP)
            _store(
                y, bias, y_ptr, k_ptr, v_ptr, position_ptr, stride_y_b, H, T, token, mask_b, offs_n, mask_n, unit,
                ours, GROUP, HEAD_DIM, RELU,
            )  # fmt: skip


def packed_up_proj(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    relu: bool = False,
    config: Config | None = None,
    ahead: bool = False,
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
    return packed_up_rows(x, w, b, idx, count, group, relu, c, ahead)


def packed_up_rows(
    x: torch.Tensor,
    w: PackedWeight,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int,
    relu: bool,
    c: Config,
    ahead: bool,
    caches: Caches | None = None,
) -> torch.Tensor:
    """`packed_up_proj` of what is checked already, for a weight and a bias of any leading dimensions.

    With `caches` units are heads, and the result is q [B, cap, head_dim].
    """
    (B, D), rows_cap = x.shape, idx.numel() * group
    head_dim = 0 if caches is None else group // 3
    shape = (B, rows_cap) if caches is None else (B, idx.numel(), head_dim)
    y = torch.empty(shape, device=x.device, dtype=x.dtype)
    lookup = lookup_of(w, x.dtype, c.dot)
    if c.dot:
        kernel, own, programs = _packed_up_proj_dot_kernel, {"STAGES": c.stages}, c.programs
    else:
        # Heads that have missed tokens may be recovered meanwhile. Were there no room left for that, it would take the
        # places of programs of this launch, and those begin when the others are nearly done.
        beside_recovery = caches is not None and caches.watermark is not None
        programs = most_programs(c, beside_recovery)
        kernel, own = (
            _packed_up_proj_kernel,
            {
                "BLOCK_D": c.block_d,
                "AWAY": c.stages,
                "HALF": c.half and lookup.asm != "" and x.dtype == torch.float16,
                "AHEAD": ahead,
                "maxnreg": most_registers(c, beside_recovery),
            },
        )
    grid = (min(triton.cdiv(rows_cap, c.block_n), programs), triton.cdiv(B, c.block_b))
    kernel[grid](
        x, *w.pointers(), lookup.table, b, idx, count, y, *(caches or (None,) * 4),
        B, rows_cap, *((0, 0) if caches is None else caches.k.shape[1:3]),
        D=D,
        BLOCKSIZE=w.blocksize,
        GROUP=group,
        HEAD_DIM=head_dim,
        RELU=relu,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        ASM=lookup.asm,
        num_warps=c.warps,
        **own,
        **launch_options(),
    )  # fmt: skip
    return y
