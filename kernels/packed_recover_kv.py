"""Recovery of missing keys and values over 4-bit rows.

`recover_kv` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [H, 3, head_dim, D] is packed and
its rows are decoded on the way; see `packed_weight` for the layout.

Most heads have missed a few tokens. With so few inputs their rows are multiplied as `packed_qkv` multiplies those of
other heads, by multiply-adds and as fast: each program takes some rows and a pair of inputs. Heads that have missed
many more come after them, by tensor cores: there the table's values are multiplied in the dtype of the inputs, and the
sum of a block by its scale. The twin multiplies by decoded elements in that dtype.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import config_for, token_block
from dejavu_ds.kernels.nibbles import byte_table, fill_table, lookup_of, offset_of, pass_no_loads, word_table
from dejavu_ds.kernels.packed_products import load_rows, load_tokens, packed_rows_dot, sum_row, sum_threads
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


# An item is one position of one sequence. By multiply-adds pairs of them, where a head has no more than so many; a
# program then takes so many of its rows.
_PAIR, _MOST_PAIRED, _ROWS = 2, 64, 16
# Rows of these that are loaded while another is multiplied, and rows whose sums across threads are made together.
_AWAY, _TOGETHER = 3, 4
# Two a multiprocessor of an H200.
_PAIR_PROGRAMS = 264
# Three programs of four warps share a multiprocessor's.
_REGISTERS = 168
# By tensor cores so many in a tile where there are no more, else in a larger one.
_FEW, _MANY = 16, 64
_BLOCK_R = 32
_STAGES = 3
_WARPS = 4
_PROGRAMS = 264


@triton.jit
def _store_items(
    y, b_ptr, k_ptr, v_ptr, head, first, offs_i, items, offs_r, B, H, T,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """y [items, rows], of a head's rows offs_r: first those of its keys, then those of its values."""
    mask_i, mask_r = offs_i < items, offs_r < 2 * HEAD_DIM
    batch = (offs_i % B).to(tl.int64)  # all B sequences of a position are neighbours
    pos = first + offs_i // B
    if b_ptr is not None:
        y += tl.load(b_ptr + (head * 3 + 1) * HEAD_DIM + offs_r, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    y = y.to(k_ptr.dtype.element_ty)
    out = ((batch * H + head) * T + pos)[:, None] * HEAD_DIM + (offs_r % HEAD_DIM)[None, :]
    tl.store(k_ptr + out, y, mask=mask_i[:, None] & (offs_r < HEAD_DIM)[None, :])
    tl.store(v_ptr + out, y, mask=mask_i[:, None] & ((offs_r >= HEAD_DIM) & mask_r)[None, :])


@triton.jit
def _load_places(
    w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, head, place, end,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`load_rows` of a head's key and value rows place .. place + BLOCK_N - 1, as far as `end`."""
    rows, ends = (), ()
    for r in tl.static_range(BLOCK_N):
        rows = rows + ((head * 3 + 1) * HEAD_DIM + place + r,)
        ends = ends + (tl.where(place + r < end, D // 16, 0),)
    return load_rows(
        w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, rows, ends, D, BLOCKSIZE, BLOCK_N, BLOCK_D
    )


@triton.jit
def _recover_pair(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
    head, first, item, items, B, H, R, T,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    ROWS: tl.constexpr,
    AWAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Keys and values of ROWS of a head's rows for two of its items. AWAY of them are on their way meanwhile."""
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    place = tl.program_id(0) * ROWS
    end = tl.minimum(place + ROWS, 2 * HEAD_DIM)
    tokens = ()
    for i in tl.static_range(PAIR):
        one = tl.minimum(item + i, items - 1)
        tokens = tokens + ((one % B).to(tl.int64) * R + (first + one // B) % R,)
    x = load_tokens(inputs_ptr, tokens, D, BLOCK_D, ASM)
    q, absmax = _load_places(
        w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, head, place, end,
        D, BLOCKSIZE, HEAD_DIM, AWAY, BLOCK_D,
    )  # fmt: skip
    offs_i = item + tl.arange(0, PAIR)
    for place in range(tl.program_id(0) * ROWS, end, BLOCK_N):
        sums = ()
        for r in tl.static_range(BLOCK_N):
            next_q, next_absmax = _load_places(
                w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, head, place + r + AWAY, end,
                D, BLOCKSIZE, HEAD_DIM, 1, BLOCK_D,
            )  # fmt: skip
            table = pass_no_loads(table, ASM)
            sums = sums + sum_row(q, absmax, x, table, 0, inputs_ptr.dtype.element_ty, HALF, ASM)
            q, absmax = q[TILES:] + next_q, absmax[TILES:] + next_absmax
        y = sum_threads(sums, PAIR, BLOCK_N)
        offs_r = place + tl.arange(0, BLOCK_N)
        _store_items(y, b_ptr, k_ptr, v_ptr, head, first, offs_i, items, offs_r, B, H, T, HEAD_DIM)


# D is a size of the model; another batch, ring or cache must not compile again.
@triton.jit(do_not_specialize=["B", "H", "R", "T", "window", "most"])
def _packed_recover_pairs_kernel(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table_ptr,
    b_ptr, selected_ptr, watermark_ptr, position_ptr, k_ptr, v_ptr,
    B, H, R, T, window, most,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAIR: tl.constexpr,
    ROWS: tl.constexpr,
    AWAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """By multiply-adds, of the heads that have missed fewer than `most` positions."""
    await_inputs(EARLY)
    place, watermark, _ = due_heads(selected_ptr, watermark_ptr, position_ptr, H, window, 0, most, BLOCK_HEADS)
    t = tl.load(position_ptr)
    pairs = tl.where(place >= 0, tl.cdiv((t + 1 - watermark) * B, PAIR), 0)
    pairs_so_far, all_pairs = tl.cumsum(pairs, axis=0), tl.sum(pairs, axis=0)
    if tl.program_id(1) >= all_pairs:
        return
    fill_table(table_ptr, ASM)
    table = word_table(table_ptr, tl.arange(0, BLOCK_D // 16), ASM)
    offset = offset_of(absmax_offset_ptr)
    heads = tl.arange(0, BLOCK_HEADS)
    for pair in range(tl.program_id(1), all_pairs, tl.num_programs(1)):
        ours = (pair >= pairs_so_far - pairs) & (pair < pairs_so_far)
        head = tl.sum(tl.where(ours, heads, 0), axis=0).to(tl.int64)
        first = tl.sum(tl.where(ours, watermark, 0), axis=0)
        item = (pair - tl.sum(tl.where(ours, pairs_so_far - pairs, 0), axis=0)) * PAIR
        _recover_pair(
            inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, b_ptr, k_ptr, v_ptr,
            head, first, item, (t + 1 - first) * B, B, H, R, T,
            D, BLOCKSIZE, HEAD_DIM, PAIR, ROWS, AWAY, BLOCK_N, BLOCK_D, HALF, ASM,
        )  # fmt: skip


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
        item = tl.minimum(offs_i, items - 1)
        batch = (item % B).to(tl.int64)
        pos = first + item // B
        y = packed_rows_dot(
            inputs_ptr, batch * R + pos % R, offs_i < items, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr,
            offset, table, row, mask_r, D, BLOCKSIZE, BLOCK_I, BLOCK_R, STAGES, ASM,
        )  # fmt: skip
        _store_items(y, b_ptr, k_ptr, v_ptr, head, first, offs_i, items, offs_r, B, H, T, HEAD_DIM)


@triton.jit(do_not_specialize=["B", "H", "R", "T", "window", "least"])
def _packed_recover_kv_kernel(
    inputs_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table_ptr,
    b_ptr, selected_ptr, watermark_ptr, position_ptr, k_ptr, v_ptr,
    B, H, R, T, window, least,
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
    """By tensor cores, of the heads that have missed `least` positions or more."""
    await_inputs(EARLY)
    place, watermark, heads_due = due_heads(selected_ptr, watermark_ptr, position_ptr, H, window, least, T, BLOCK_HEADS)
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
    least = 0 if token_block(B)[1] else _MOST_PAIRED // B

    def arguments(table: torch.Tensor) -> tuple:
        pointers = b, selected.view(torch.uint8), watermark, position, k_cache, v_cache
        return inputs, *w.pointers(), table, *pointers, B, H, R, k_cache.shape[2], window, least

    sizes = {"D": D, "BLOCKSIZE": w.blocksize, "HEAD_DIM": head_dim, "BLOCK_HEADS": triton.next_power_of_2(H)}
    if least:
        c = config_for("packed_qkv", _PAIR, D, inputs.dtype)
        tiles, lookup = triton.cdiv(2 * head_dim, _ROWS), lookup_of(w, inputs.dtype, dot=False)
        pairs = min(H * _MOST_PAIRED // _PAIR, max(1, _PAIR_PROGRAMS // tiles))
        _packed_recover_pairs_kernel[(tiles, pairs)](
            *arguments(lookup.table),
            **sizes,
            PAIR=_PAIR,
            ROWS=_ROWS,
            AWAY=_AWAY,
            BLOCK_N=_TOGETHER,
            BLOCK_D=c.block_d,
            HALF=c.half and lookup.asm != "" and inputs.dtype == torch.float16,
            ASM=lookup.asm,
            maxnreg=_REGISTERS,
            num_warps=c.warps,
            **launch_options(),
        )
    tiles, lookup = triton.cdiv(2 * head_dim, _BLOCK_R), lookup_of(w, inputs.dtype, dot=True)
    _packed_recover_kv_kernel[(tiles, max(1, min(H, _PROGRAMS // tiles)))](
        *arguments(lookup.table),
        **sizes,
        BLOCK_R=_BLOCK_R,
        FEW=_FEW,
        MANY=_MANY,
        STAGES=_STAGES,
        ASM=lookup.asm,
        num_warps=_WARPS,
        **launch_options(),
    )
