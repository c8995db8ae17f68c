"""Recovery of missing keys and values over 4-bit rows.

`recover_kv` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [H, 3, head_dim, D] is packed and
its rows are decoded on the way; see `packed_weight` for the layout.

Tensor cores multiply the table's values in the dtype of the inputs, and the sum of a block is multiplied by its scale:
however many positions a head has missed, its rows are decoded once for a tile of them. The twin multiplies by decoded
elements in that dtype.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import RECOVERY_REGISTERS, RECOVERY_WARPS
from dejavu_ds.kernels.nibbles import byte_table, decode_bytes, load_masked, lookup_of, offset_of, scales
from dejavu_ds.kernels.packed_weight import PackedWeight
from dejavu_ds.kernels.recover_kv import check_recover, due_heads, head_of, place_tile, store_tile
from dejavu_ds.kernels.tiles import await_inputs, dot, launch_options


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


# An item is one position of one sequence. Heads with up to _FEW of them are seen to in tiles of few items, others in
# tiles of many: (items, rows, stages of the pipeline). Rows in 4 bits are short, so that of few items many steps are on
# their way at a time; what is kept for them is mostly inputs.
_FEW = 32
_TILES = ((8, 16, 8), (16, 16, 4))
# Groups of blocks, one a warp: products of a row follow one another, some of them at a time.
_SPLIT = RECOVERY_WARPS
# One a multiprocessor of an H200, which `packed_qkv` leaves room for.
_PROGRAMS = 132


@triton.jit
def _load_pairs(x_ptr, offs, mask):
    """The elements 2 * offs and 2 * offs + 1 of x; of 16 bits both are one load, which no layout takes apart."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        pair = load_masked(x_ptr.to(tl.pointer_type(tl.int32)) + offs, mask)
        even = pair.to(tl.int16).to(dtype, bitcast=True)
        odd = (pair >> 16).to(tl.int16).to(dtype, bitcast=True)
    else:
        even, odd = load_masked(x_ptr + 2 * offs, mask), load_masked(x_ptr + 2 * offs + 1, mask)
    return even, odd


@triton.jit
def _recover_tile(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
    head, first, items, part, B, H, R, T,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Keys and values of some of a head's rows for some of its items, as `recover_kv` computes them."""
    BYTES: tl.constexpr = BLOCKSIZE // 2
    BLOCKS: tl.constexpr = D // BLOCKSIZE
    offs_r, row, offs_i, x_row = place_tile(part, head, first, items, B, R, HEAD_DIM, BLOCK_I, BLOCK_R)
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8))
    y = tl.zeros((SPLIT, BLOCK_R, BLOCK_I), dtype=tl.float32)
    for b in tl.range(0, BLOCKS, SPLIT, num_stages=STAGES):
        block = b + tl.arange(0, SPLIT)
        # Inputs are as many bytes as weights, so those of no item are not read.
        mask_w, mask_x = None, (offs_i < items)[None, :, None]
        if BLOCKS % SPLIT != 0:
            mask_w = (block < BLOCKS)[:, None] & (row >= 0)[None, :]
            mask_x = mask_x & (block < BLOCKS)[:, None, None]
        # [SPLIT, BLOCK_R or BLOCK_I, BYTES]
        offs_p = block[:, None, None] * BYTES + tl.arange(0, BYTES)[None, None, :]
        p = load_masked(w_ptr + row[None, :, None] * (D // 2) + offs_p, None if mask_w is None else mask_w[:, :, None])
        even, odd = _load_pairs(inputs_ptr, x_row[None, :, None] * (D // 2) + offs_p, mask_x)
        absmax = scales(
            absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, block[:, None], row[None, :] * BLOCKS, mask_w
        )
        high, low = decode_bytes(p, table, inputs_ptr.dtype.element_ty, ASM)
        products = dot(high, tl.permute(even, (0, 2, 1)), tl.zeros((SPLIT, BLOCK_R, BLOCK_I), dtype=tl.float32))
        products = dot(low, tl.permute(odd, (0, 2, 1)), products)
        y += products * absmax[:, :, None]
    store_tile(
        tl.sum(y, axis=0), b_ptr, k_ptr, v_ptr, head, first, items, offs_r, row, offs_i, B, H, T, HEAD_DIM
    )  # fmt: skip


@triton.jit
def _recover_tiles(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
    concerned, watermark, t, B, H, R, T,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Keys and values of the heads concerned, tile by tile, all tiles spread over the programs."""
    TILES: tl.constexpr = (2 * HEAD_DIM + BLOCK_R - 1) // BLOCK_R
    parts = tl.where(concerned, tl.cdiv((t + 1 - watermark) * B, BLOCK_I) * TILES, 0)
    end = tl.cumsum(parts, axis=0)
    for i in range(tl.program_id(0), tl.sum(parts, axis=0), tl.num_programs(0)):
        head, first, part = head_of(i, parts, end, watermark, BLOCK_HEADS)
        _recover_tile(
            inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
            head, first, (t + 1 - first) * B, part, B, H, R, T,
            D, BLOCKSIZE, HEAD_DIM, BLOCK_I, BLOCK_R, SPLIT, STAGES, ASM,
        )  # fmt: skip


# D is a size of the model; another batch, ring or cache must not compile again.
@triton.jit(do_not_specialize=["B", "H", "R", "T", "window", "few"])
def _packed_recover_kv_kernel(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table_ptr,
    b_ptr, selected_ptr, watermark_ptr, position_ptr, k_ptr, v_ptr,
    B, H, R, T, window, few,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    FEW_I: tl.constexpr,
    FEW_R: tl.constexpr,
    FEW_STAGES: tl.constexpr,
    MANY_I: tl.constexpr,
    MANY_R: tl.constexpr,
    MANY_STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """few  heads that miss fewer positions are seen to in tiles of few items"""
    await_inputs(EARLY)
    due, watermark, heads_due = due_heads(selected_ptr, watermark_ptr, position_ptr, H, window, BLOCK_HEADS)
    if heads_due == 0:
        return
    t = tl.load(position_ptr)
    offset = offset_of(absmax_offset_ptr)
    table = byte_table(table_ptr, tl.arange(0, BLOCKSIZE // 2)[None, None, :], ASM)
    has_few = t - watermark < few
    _recover_tiles(
        inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
        due & has_few, watermark, t, B, H, R, T,
        D, BLOCKSIZE, HEAD_DIM, BLOCK_HEADS, FEW_I, FEW_R, FEW_STAGES, SPLIT, ASM,
    )  # fmt: skip
    _recover_tiles(
        inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
        due & (has_few == 0), watermark, t, B, H, R, T,
        D, BLOCKSIZE, HEAD_DIM, BLOCK_HEADS, MANY_I, MANY_R, MANY_STAGES, SPLIT, ASM,
    )  # fmt: skip


def packed_recover_kv(
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
    """Store keys and values of the heads that miss some and are selected or overdue, as `recover_kv` does.

    Raises:
        ValueError: wrong shapes, a window beyond the ring, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    check_recover(inputs, w, b, selected, watermark, position, k_cache, v_cache, window)
    B, R, D = inputs.shape
    H, _, head_dim, _ = w.shape
    lookup = lookup_of(w, inputs.dtype, dot=True)
    few, many = _TILES
    _packed_recover_kv_kernel[(_PROGRAMS,)](
        inputs, *w.pointers(), lookup.table, b, selected.view(torch.uint8), watermark, position, k_cache, v_cache,
        B, H, R, k_cache.shape[2], window, _FEW // B,
        D=D,
        BLOCKSIZE=w.blocksize,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(H),
        **dict(zip(("FEW_I", "FEW_R", "FEW_STAGES"), few, strict=True)),
        **dict(zip(("MANY_I", "MANY_R", "MANY_STAGES"), many, strict=True)),
        SPLIT=_SPLIT,
        ASM=lookup.asm,
        num_warps=RECOVERY_WARPS,
        # Exact products of fp32 take more, and are not in a hurry.
        maxnreg=RECOVERY_REGISTERS if inputs.element_size() == 2 else 255,
        **launch_options(),
    )  # fmt: skip
