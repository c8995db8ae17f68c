"""Gathered down-projection over 4-bit rows: y = sum over the kept rows n of h[:, n] * w[n].

`gather_down_proj` for a `PackedWeight`: the same arguments, shapes and meaning, but that w [N * group, D], stored
transposed, is packed and its rows are decoded on the way; see `packed_weight` for the layout and `nibbles` for the
decoding.

Units of whole blocks of rows, heads as a rule, are walked over block by block (`_walk_units`), others as `wanted_rows`
says. Columns of h beyond the kept ones may be read, and do not matter.

The twin multiplies decoded elements, rounded to the dtype of h, and so does the kernel with tensor cores, from 5 tokens
on. With fewer it multiplies the table's values by h times the scale, in fp32; for 16-bit activations the table is
rounded to fp16. With `half` in its configuration, for one token in fp16, h times the scale is rounded to fp16 too, and
as many products are added in fp16 as a thread holds rows at a time: h times a weight must then stay below 8192, and
what lies below 2 ** -14 loses digits.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config, config_for, most_registers, packed_rows_at_once
from dejavu_ds.kernels.dense import packed_times_ref
from dejavu_ds.kernels.gather_down_proj import check_down, in_parts, shares_of
from dejavu_ds.kernels.nibbles import (
    WORD,
    add_two_words_half,
    add_word,
    add_word_half,
    byte_table,
    decode,
    decode_bytes,
    fill_table,
    lookup_of,
    offset_of,
    pass_no_loads,
    scales,
    split_pairs,
    word_table,
)
from dejavu_ds.kernels.packed_weight import PackedWeight, rows_of
from dejavu_ds.kernels.tiles import await_inputs, dot, launch_options
from dejavu_ds.kernels.wanted_rows import (
    ask,
    ask_places,
    cut,
    declare,
    first_places,
    list_address,
    list_wanted,
    row_and_mask,
    store_sum,
    walk_options,
)

_WORD = tl.constexpr(WORD)


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
    return in_parts(y, out)


@triton.jit
def _words(w_ptrs, mask, WIDE: tl.constexpr):
    """WIDE words at each of w_ptrs, one or two, as a tuple. Weights pass through the L1 cache."""
    if WIDE == 1:
        return (tl.load(w_ptrs, mask=mask, other=0, eviction_policy="evict_first"),)
    else:
        ptrs = w_ptrs[:, None] + tl.arange(0, 2)[None, :]
        return tl.split(tl.load(ptrs, mask=mask[:, None], other=0, eviction_policy="evict_first"))


@triton.jit
def _weights(
    w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, units, h, place, rows, word,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """WIDE words from `word` on and their scale, of the rows at these places that some token wants: two tuples."""
    WORDS: tl.constexpr = D // _WORD
    q, absmax = (), ()
    for u in tl.static_range(STEPS):
        row, mask = row_and_mask(units, h, place, rows, u, GROUP, SKIP_ZEROS, BLOCK_B, ROWS, LISTED)
        if D % BLOCK_D != 0:
            mask = mask & (word < WORDS)
        q = q + _words(w_ptr + word + row * WORDS, mask, WIDE)
        column, first = word // (BLOCKSIZE // _WORD), row * (D // BLOCKSIZE)
        absmax = absmax + (scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, column, first, mask),)
    return q, absmax


@triton.jit
def _add(
    acc, q, absmax, h, table,
    BLOCK_B: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    SKIP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc, 16 tensors for each word of a thread and each token, and h * absmax * the elements of q."""
    for u in tl.static_range(STEPS):
        new = ()
        for c in tl.static_range(WIDE):
            if BLOCK_B == 1 and ASM != "":
                sums = ()
                for i in tl.static_range(_WORD):
                    sums = sums + (acc[c * _WORD + i],)
                s = h[u].to(tl.float32) * absmax[u]
                added = add_word(sums, q[u * WIDE + c], s, table, SKIP)
                for i in tl.static_range(_WORD):
                    new = new + (added[i],)
            else:
                w = decode(q[u * WIDE + c], table, ASM)
                for b in tl.static_range(BLOCK_B):
                    s = h[u * BLOCK_B + b].to(tl.float32) * absmax[u]
                    for i in tl.static_range(_WORD):
                        new = new + (acc[(c * BLOCK_B + b) * _WORD + i] + s * w[i],)
        acc = new
    return acc


@triton.jit
def _add_half(acc, q, absmax, h, table, STEPS: tl.constexpr, WIDE: tl.constexpr, SKIP: tl.constexpr):
    """The same for one token, added up over the steps in half precision."""
    sums = ()
    for _ in tl.static_range(WIDE * _WORD // 2):
        sums = sums + (tl.zeros_like(absmax[0]).to(tl.int32),)
    for u in tl.static_range(STEPS):
        s = h[u].to(tl.float32) * absmax[u]
        if WIDE == 2:
            sums = add_two_words_half(sums, (q[2 * u], q[2 * u + 1]), s, table, SKIP)
        else:
            sums = add_word_half(sums, q[u], s, table, SKIP)
    out = ()
    for i in tl.static_range(WIDE * _WORD // 2):
        low, high = split_pairs(sums[i])
        out = out + (acc[2 * i] + low, acc[2 * i + 1] + high)
    return out


@triton.jit
def _add_block(
    acc, q, absmax, h, table,
    BLOCK_B: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    SKIP: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc and the first STEPS steps of q, behind the loads that were asked for before; and the table for what follows.

    SKIP  of `add_word`
    """
    table = pass_no_loads(table, ASM)
    if HALF:
        acc = _add_half(acc, q, absmax, h, table, STEPS, WIDE, SKIP)
    else:
        acc = _add(acc, q, absmax, h, table, BLOCK_B, STEPS, WIDE, SKIP, ASM)
    return acc, table


@triton.jit
def _walk(
    acc, h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, idx_ptr, listed, units, h,
    first, step, rows, thread, word, first_b, B, stride_h_b,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    AWAY: tl.constexpr,
    WIDE: tl.constexpr,
    LISTED: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc and the rows at places first .. rows - 1, every `step` a block.

    While one is multiplied the words of AWAY blocks are on their way. units, h: what `ask` says of the first AWAY + 1
    blocks; of none where it asks the list, which is quick.
    """
    OF_BLOCK: tl.constexpr = STEPS * BLOCK_B
    place = first + thread // (thread.shape[0] // ROWS)
    q, absmax, factors = (), (), ()
    for _ in tl.static_range(AWAY):
        if LISTED:
            units, h = ask(h_ptr, idx_ptr, listed, place, rows, first_b, B, stride_h_b, 1, 1, ROWS, STEPS, True)
        more_q, more_absmax = _weights(
            w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, units[:STEPS], h[:OF_BLOCK], place, rows,
            word, D, BLOCKSIZE, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D, ROWS, STEPS, WIDE, LISTED,
        )  # fmt: skip
        q, absmax, factors = q + more_q, absmax + more_absmax, factors + h[:OF_BLOCK]
        units, h = units[STEPS:], h[OF_BLOCK:]
        place += step
    for _ in range(first, rows, step):
        if LISTED:
            next_units, next_h = ask(
                h_ptr, idx_ptr, listed, place, rows, first_b, B, stride_h_b, 1, 1, ROWS, STEPS, True
            )
        else:
            next_units, next_h = units, h
        next_q, next_absmax = _weights(
            w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, next_units, next_h, place, rows, word,
            D, BLOCKSIZE, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D, ROWS, STEPS, WIDE, LISTED,
        )  # fmt: skip
        place += step
        if not LISTED:
            units, h = ask(
                h_ptr, idx_ptr, None, place, rows, first_b, B, stride_h_b, GROUP, BLOCK_B, ROWS, STEPS, False
            )
        acc, table = _add_block(acc, q, absmax, factors, table, BLOCK_B, STEPS, WIDE, True, HALF, ASM)
        q, absmax = q[STEPS * WIDE :] + next_q, absmax[STEPS:] + next_absmax
        factors = factors[OF_BLOCK:] + next_h
    return acc


@triton.jit
def _ask_unit(idx_ptr, block, blocks, cap, OF_UNIT: tl.constexpr):
    """The unit of a block, int64; 0 from `blocks` on, where the list may hold anything and nothing is read."""
    # Masked by the capacity, not the count, for which it then need not wait.
    unit = tl.load(idx_ptr + block // OF_UNIT, mask=block < cap * OF_UNIT, other=0)
    return tl.where(block < blocks, unit, 0).to(tl.int64)


@triton.jit
def _block_of_unit(
    h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, unit, block, blocks, row, word, first_b, B,
    stride_h_b,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Words, scales and h of a block that lies within one unit, zeros from `blocks` on: three tuples by steps.

    row  [threads], of the block's first step
    """
    WORDS: tl.constexpr = D // _WORD
    first = unit * GROUP + block % (GROUP // BLOCK_N) * BLOCK_N
    exists = tl.where(block < blocks, ROWS, 0)
    mask = row < exists
    mask_w = mask
    if D % BLOCK_D != 0:
        mask_w = mask & (word < WORDS)
    q, absmax, h = (), (), ()
    # All addresses of a thread differ by constants from one that the whole block shares.
    w_ptr += first * WORDS
    column = row * (D // BLOCKSIZE) + word // (BLOCKSIZE // _WORD)
    h_ptr += first_b * stride_h_b + block * BLOCK_N
    for u in tl.static_range(STEPS):
        q = q + _words(w_ptr + (row * WORDS + word) + u * ROWS * WORDS, mask_w, WIDE)
        absmax = absmax + (
            scales(
                absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, column,
                (first + u * ROWS) * (D // BLOCKSIZE), mask_w,
            ),
        )  # fmt: skip
        for b in tl.static_range(BLOCK_B):
            mask_h = mask
            if b > 0:
                mask_h = row < tl.where(first_b + b < B, exists, 0)
            h = h + (tl.load(h_ptr + b * stride_h_b + row + u * ROWS, mask=mask_h, other=0.0),)
    return q, absmax, h


@triton.jit
def _walk_units(
    acc, h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table, idx_ptr, count_ptr,
    thread, word, first_b, B, stride_h_b,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    AWAY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc and the rows of this share, of whole units, each of which is one block of rows or several.

    While one block is multiplied the words of AWAY blocks are on their way. The rows of a block follow one another, so
    all of them have one address, where `_walk` works one out for every row.
    """
    STEPS: tl.constexpr = BLOCK_N // ROWS
    OF_UNIT: tl.constexpr = GROUP // BLOCK_N
    OF_BLOCK: tl.constexpr = STEPS * BLOCK_B
    share, shares = tl.program_id(1), tl.num_programs(1)
    cap = stride_h_b // GROUP
    row = thread // (thread.shape[0] // ROWS)
    blocks = tl.load(count_ptr) * OF_UNIT
    offset = offset_of(absmax_offset_ptr)
    q, absmax, h = (), (), ()
    for away in tl.static_range(AWAY):
        block = share + away * shares
        more_q, more_absmax, more_h = _block_of_unit(
            h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset,
            _ask_unit(idx_ptr, block, blocks, cap, OF_UNIT), block, blocks, row, word, first_b, B, stride_h_b,
            D, BLOCKSIZE, GROUP, BLOCK_B, BLOCK_N, BLOCK_D, ROWS, STEPS, WIDE,
        )  # fmt: skip
        q, absmax, h = q + more_q, absmax + more_absmax, h + more_h
    unit = _ask_unit(idx_ptr, share + AWAY * shares, blocks, cap, OF_UNIT)
    for here in range(share, blocks, shares):
        block = here + AWAY * shares
        next_q, next_absmax, next_h = _block_of_unit(
            h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, unit, block, blocks, row, word,
            first_b, B, stride_h_b, D, BLOCKSIZE, GROUP, BLOCK_B, BLOCK_N, BLOCK_D, ROWS, STEPS, WIDE,
        )  # fmt: skip
        unit = _ask_unit(idx_ptr, block + shares, blocks, cap, OF_UNIT)
        acc, table = _add_block(acc, q, absmax, h, table, BLOCK_B, STEPS, WIDE, False, HALF, ASM)
        q, absmax = q[STEPS * WIDE :] + next_q, absmax[STEPS:] + next_absmax
        h = h[OF_BLOCK:] + next_h
    return acc


@triton.jit
def _sum_of_rows(
    h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table, idx_ptr, count_ptr,
    thread, word, first_b, B, stride_h_b,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    AWAY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    EACH: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """By multiply-adds, of this share's rows: for each token and word of a thread 16 tensors [threads], by columns.

    EACH  places a thread that are listed at a time; 0: there is no list, and blocks of BLOCK_N places are taken in turn
    Where the first places of a share lie does not hang on the count, so that they are asked for at the same time as it.
    """
    STEPS: tl.constexpr = BLOCK_N // ROWS
    LANES: tl.constexpr = thread.shape[0] // ROWS
    share, shares = tl.program_id(1), tl.num_programs(1)
    acc = ()
    for _ in tl.static_range(BLOCK_B * WIDE * _WORD):
        acc = acc + (tl.zeros_like(thread).to(tl.float32),)
    if GROUP > 1 and GROUP % BLOCK_N == 0 and not SKIP_ZEROS:
        acc = _walk_units(
            acc, h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table, idx_ptr,
            count_ptr, thread, word, first_b, B, stride_h_b,
            D, BLOCKSIZE, GROUP, BLOCK_B, BLOCK_N, ROWS, AWAY, BLOCK_D, WIDE, HALF, ASM,
        )  # fmt: skip
    elif EACH > 0:
        h_ptr += first_b * stride_h_b
        first, start, step = first_places(share, shares, thread, EACH)
        units, h = ask_places(h_ptr, idx_ptr, start, stride_h_b, GROUP, EACH)
        rows = tl.load(count_ptr) * GROUP
        offset = offset_of(absmax_offset_ptr)
        for here in range(first, rows, step):
            n = list_wanted(units, h, start, rows, thread, EACH)
            # Not pure: so it stays behind the barrier, and with it the reads of the list, which are, lest Triton keeps
            # a copy of each for every layout, but depend on it.
            listed = list_address(thread)
            start += step
            if here + step < rows:
                units, h = ask_places(h_ptr, idx_ptr, start, rows, GROUP, EACH)
            acc = _walk(
                acc, h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, idx_ptr, listed,
                (), (), 0, BLOCK_N, n, thread, word, first_b, B, stride_h_b,
                D, BLOCKSIZE, 1, False, 1, BLOCK_D, ROWS, STEPS, AWAY, WIDE, True, HALF, ASM,
            )  # fmt: skip
    else:
        first, step = share * BLOCK_N, shares * BLOCK_N
        place = first + thread // LANES
        units, h = (), ()
        for away in tl.static_range(AWAY + 1):
            more, more_h = ask(
                h_ptr, idx_ptr, None, place + away * step, stride_h_b, first_b, B, stride_h_b,
                GROUP, BLOCK_B, ROWS, STEPS, False,
            )  # fmt: skip
            units, h = units + more, h + more_h
        rows = tl.load(count_ptr) * GROUP
        offset = offset_of(absmax_offset_ptr)
        known = ()
        for away in tl.static_range(AWAY + 1):
            of_block = h[away * STEPS * BLOCK_B : (away + 1) * STEPS * BLOCK_B]
            known = known + cut(of_block, place + away * step, rows, BLOCK_B, ROWS, STEPS)
        acc = _walk(
            acc, h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, idx_ptr, None,
            units, known, first, step, rows, thread, word, first_b, B, stride_h_b,
            D, BLOCKSIZE, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D, ROWS, STEPS, AWAY, WIDE, False, HALF, ASM,
        )  # fmt: skip
    return acc


@triton.jit
def _dot_of_rows(
    h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table_ptr, idx_ptr, first, rows, first_b, B,
    strip, stride_h_b,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """[BLOCK_B, BLOCK_D] fp32 by tensor cores, of the places first .. rows - 1; a strip lies within one block."""
    BYTES: tl.constexpr = BLOCK_D // 2
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8))
    offs_p = strip * BYTES + tl.arange(0, BYTES)
    table = byte_table(table_ptr, tl.arange(0, BYTES)[None, :], ASM)
    even = tl.zeros((BLOCK_B, BYTES), dtype=tl.float32)
    odd = tl.zeros((BLOCK_B, BYTES), dtype=tl.float32)
    offs_b = first_b + tl.arange(0, BLOCK_B)
    h_ptrs = h_ptr + offs_b[:, None] * stride_h_b
    for n in tl.range(first, rows, BLOCK_N, num_stages=STAGES):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < rows
        unit = tl.load(idx_ptr + offs_n // GROUP, mask=mask_n, other=0).to(tl.int64)
        row = unit * GROUP + offs_n % GROUP
        h = tl.load(h_ptrs + offs_n[None, :], mask=(offs_b < B)[:, None] & mask_n[None, :], other=0.0)
        p = tl.load(w_ptr + row[:, None] * (D // 2) + offs_p[None, :], mask=mask_n[:, None], other=0)
        column = strip * BLOCK_D // BLOCKSIZE
        first_s = row * (D // BLOCKSIZE)
        absmax = scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, column, first_s, mask_n)
        high, low = decode_bytes(p, table, tl.float32, ASM)
        even = dot(h, (high * absmax[:, None]).to(dtype), even)
        odd = dot(h, (low * absmax[:, None]).to(dtype), odd)
    return tl.reshape(tl.join(even, odd), (BLOCK_B, BLOCK_D))


# B and the capacity are not specialised: another batch must not compile again.
@triton.jit(do_not_specialize=["B", "stride_h_b"])
def _packed_down_proj_kernel(
    h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table_ptr,
    idx_ptr, count_ptr, y_ptr,
    B, stride_h_b,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    AWAY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    EACH: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """By multiply-adds; a thread has WIDE neighbouring words of the strip."""
    LANES: tl.constexpr = BLOCK_D // (16 * WIDE)
    fill_table(table_ptr, ASM)
    declare(EACH > 0 or SHARED)
    await_inputs(EARLY)
    strip = tl.program_id(0)
    first_b = tl.program_id(2).to(tl.int64) * BLOCK_B
    thread = tl.arange(0, ROWS * LANES)
    table = word_table(table_ptr, thread, ASM)
    acc = _sum_of_rows(
        h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table, idx_ptr, count_ptr,
        thread, (strip * LANES + thread % LANES) * WIDE, first_b, B, stride_h_b,
        D, BLOCKSIZE, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_N, ROWS, AWAY, BLOCK_D, WIDE, EACH, HALF, ASM,
    )  # fmt: skip
    for b in tl.static_range(BLOCK_B):
        parts = ()
        for c in tl.static_range(WIDE):
            for i in tl.static_range(_WORD):
                parts = parts + (acc[(c * BLOCK_B + b) * _WORD + i],)
        place = tl.program_id(1).to(tl.int64) * B + first_b + b
        end = tl.where(first_b + b < B, D - strip * BLOCK_D, 0)
        store_sum(parts, y_ptr + place * D + strip * BLOCK_D, end, thread, ROWS, LANES, WIDE * 16, SHARED)


@triton.jit(do_not_specialize=["B", "stride_h_b"])
def _packed_down_proj_dot_kernel(
    h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, table_ptr,
    idx_ptr, count_ptr, y_ptr,
    B, stride_h_b,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """By tensor cores."""
    await_inputs(EARLY)
    strip = tl.program_id(0)
    first_b = tl.program_id(2).to(tl.int64) * BLOCK_B
    rows = tl.load(count_ptr) * GROUP
    offset = offset_of(absmax_offset_ptr)
    share = tl.cdiv(rows, tl.num_programs(1))
    first = tl.program_id(1) * share
    rows = tl.minimum(first + share, rows)
    y = _dot_of_rows(
        h_ptr, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table_ptr, idx_ptr, first, rows,
        first_b, B, strip, stride_h_b,
        D, BLOCKSIZE, GROUP, BLOCK_B, BLOCK_N, BLOCK_D, STAGES, ASM,
    )  # fmt: skip
    offs_b = first_b + tl.arange(0, BLOCK_B)
    offs_d = strip * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (offs_b < B)[:, None] & (offs_d < D)[None, :]
    place = tl.program_id(1).to(tl.int64) * B + offs_b
    tl.store(y_ptr + place[:, None] * D + offs_d[None, :], y, mask=mask)


def packed_down_proj(
    h: torch.Tensor,
    w: PackedWeight,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Return the sum over the kept rows of h[:, n] * w[n], in S parts, as `gather_down_proj` does.

    Each kept row of `w` is read once for every 16 tokens. `out` [S, B, D] fp32, contiguous, takes the result and says
    what S is. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, a `group` that does not divide the rows, or tensors that are not contiguous.
        TypeError: h and w of different dtypes, idx or count not int32, or out not fp32.
    """
    check_down(h, w, idx, count, group, out)
    B, D = h.shape[0], w.shape[1]
    c = config or config_for("packed_down_proj" if group == 1 else "packed_out_proj", B, D, h.dtype, out is not None)
    lookup = lookup_of(w, h.dtype, c.dot)
    strips, tiles = triton.cdiv(D, c.block_d), triton.cdiv(B, c.block_b)
    y = torch.empty(shares_of(c, h, D), B, D, device=h.device, dtype=torch.float32) if out is None else out
    if c.dot:
        kernel, own = _packed_down_proj_dot_kernel, {"STAGES": c.stages}
    else:
        rows, lanes = min(c.block_n, packed_rows_at_once(c)), max(1, c.block_d // (WORD * c.wide))
        kernel, own = (
            _packed_down_proj_kernel,
            {
                **walk_options(c, rows, lanes, skip_zeros),
                "AWAY": c.stages,
                "maxnreg": most_registers(c),
                "WIDE": c.wide,
                "HALF": c.half and c.block_b == 1 and lookup.asm != "" and h.dtype == torch.float16,
            },
        )
    kernel[(strips, len(y), tiles)](
        h, *w.pointers(), lookup.table, idx, count, y,
        B, h.shape[1],
        D=D,
        BLOCKSIZE=w.blocksize,
        GROUP=group,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        ASM=lookup.asm,
        num_warps=c.warps,
        **own,
        **launch_options(),
    )  # fmt: skip
    return y
