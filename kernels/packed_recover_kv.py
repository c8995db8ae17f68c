"""Recovery of missing keys and values over 4-bit rows.

`recover_kv` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [H, 3, head_dim, D] is packed and
its rows are decoded on the way; see `packed_weight` for the layout. The kernel multiplies by the table's values in the
dtype of the inputs and the sum of a block by its scale, the twin by decoded elements in that dtype.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dejavu_ds.kernels.nibbles import byte_table, lookup_of, offset_of
from dejavu_ds.kernels.packed_products import packed_rows_dot
from dejavu_ds.kernels.packed_weight import PackedWeight
from dejavu_ds.kernels.recover_kv import check_recover, due_heads
from dejavu_ds.kernels.tiles import await_inputs, launch_options


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


# An item is one position of one sequence: so many in a tile where there are no more, else in a larger one.
_FEW, _MANY = 16, 64
_BLOCK_R = 32
_STAGES = 3
_WARPS = 4
# Two a multiprocessor of an H200.
_PROGRAMS = 264


@triton.jit
def _recover_rows(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
    head, first, items, B, H, R, T,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Keys and values of one tile of a head's rows, for all its missing positions from `first` on."""
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # the key rows of the head, then its value rows
    row = (head * 3 + 1) * HEAD_DIM + offs_r
    mask_r = offs_r < 2 * HEAD_DIM
    for i in range(0, items, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        item = tl.minimum(offs_i, items - 1)  # all B sequences of a position are neighbours
        batch = (item % B).to(tl.int64)
        pos = first + item // B
        mask_i = offs_i < items
        y = packed_rows_dot(
            inputs_ptr, batch * R + pos % R, mask_i, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset,
            table, row, mask_r, D, BLOCKSIZE, BLOCK_I, BLOCK_R, STAGES, ASM,
        )  # fmt: skip
        if b_ptr is not None:
            y += tl.load(b_ptr + row, mask=mask_r, other=0.0).to(tl.float32)[None, :]
        y = y.to(k_ptr.dtype.element_ty)
        out = ((batch * H + head) * T + pos)[:, None] * HEAD_DIM + (offs_r % HEAD_DIM)[None, :]
        tl.store(k_ptr + out, y, mask=mask_i[:, None] & (offs_r < HEAD_DIM)[None, :])
        tl.store(v_ptr + out, y, mask=mask_i[:, None] & ((offs_r >= HEAD_DIM) & mask_r)[None, :])


# D is a size of the model; another batch, ring or cache must not compile again.
@triton.jit(do_not_specialize=["B", "H", "R", "T", "window"])
def _packed_recover_kv_kernel(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table_ptr,
    b_ptr, selected_ptr, watermark_ptr, position_ptr, k_ptr, v_ptr,
    B, H, R, T, window,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    place, watermark, heads_due = due_heads(selected_ptr, watermark_ptr, position_ptr, H, window, BLOCK_HEADS)
    if heads_due == 0:
        return
    heads = tl.arange(0, BLOCK_HEADS)
    t = tl.load(position_ptr)
    offset = offset_of(absmax_offset_ptr)
    table = byte_table(table_ptr, tl.arange(0, BLOCKSIZE // 2)[None, :], ASM)
    for j in range(tl.program_id(1), heads_due, tl.num_programs(1)):
        head = tl.sum(tl.where(place == j, heads, 0), axis=0).to(tl.int64)
        first = tl.sum(tl.where(place == j, watermark, 0), axis=0)
        items = (t + 1 - first) * B
        if items <= FEW:
            _recover_rows(
                inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
                head, first, items, B, H, R, T, D, BLOCKSIZE, HEAD_DIM, FEW, BLOCK_R, STAGES, ASM,
            )  # fmt: skip
        else:
            _recover_rows(
                inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
                head, first, items, B, H, R, T, D, BLOCKSIZE, HEAD_DIM, MANY, BLOCK_R, STAGES, ASM,
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
    tiles, lookup = triton.cdiv(2 * head_dim, _BLOCK_R), lookup_of(w, inputs.dtype, dot=True)
    _packed_recover_kv_kernel[(tiles, max(1, min(H, _PROGRAMS // tiles)))](
        inputs, *w.pointers(), lookup.table, b, selected.view(torch.uint8), watermark, position, k_cache, v_cache,
        B, H, R, k_cache.shape[2], window,
        D=D,
        BLOCKSIZE=w.blocksize,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(H),
        BLOCK_R=_BLOCK_R,
        FEW=_FEW,
        MANY=_MANY,
        STAGES=_STAGES,
        ASM=lookup.asm,
        num_warps=_WARPS,
        **launch_options(),
    )  # fmt: skip
