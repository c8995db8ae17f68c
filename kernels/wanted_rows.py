"""The walk of a down-projection over kept rows, which of them it needs, and the sum of what its threads have added up.

A program has ROWS times LANES threads: LANES of them hold a strip of one row, and each walks every ROWS-th row. So sums
stay within a thread, and all tensors have one dimension and one layout. While some rows are added up the next ones are
on their way, and what says where those after lie.

Of the kept rows ReLU leaves about half with an h of zero. Were they only passed over, their threads would wait for
those of others, and half as many bytes would be on their way at a time. So for one token a program first lists in
shared memory the rows of its share that are wanted, up to `LIST` at a time, and walks over the list. Where a row goes
follows from the numbers of wanted rows before it, by a vote of each warp, so the same bits come out in every run. That
takes a small part of the time in which a weight comes from memory. With more tokens hardly a row is unwanted by all,
and heads are wanted whole: then rows are walked over as they are kept; 4-bit heads of whole blocks by
`packed_down_proj._walk_units`.

The sums of a thread are those of many columns. To add them up over the rows that a warp holds, each exchange of two
lanes halves the columns that a lane goes on with: 16 + 8 + 4 exchanges for 32 columns and 8 rows, where to add up one
column after the other takes 3 * 32. What is left, one row a warp, goes through shared memory.

Shared memory is declared and read by inline assembly, see `nibbles`; in Triton's interpreter, where that does not run,
rows are walked over as they are kept and sums are Triton's.
"""

import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config
from dejavu_ds.kernels.packed_products import join_all
from dejavu_ds.kernels.tiles import _INTERPRETED

LIST = 1024
"""Rows that a program lists at a time, 8 bytes each: with the table of 4-bit rows they fit into 48 KB."""
_LIST = tl.constexpr(LIST)
# Places that a thread lists at a time, at most: as many registers hold what is known of the next ones.
_MOST_EACH = 8
# Threads whose places lie side by side.
_RUN = tl.constexpr(4)

# The list; behind it, how many rows each warp wants. In the end the sums of warps take its place.
_BYTES = 8 * LIST
_DECLARE_ASM = tl.constexpr(f".shared .align 128 .b8 wanted_rows[{_BYTES + 128}]; mov.b32 $0, 0;")
_ADDRESS_ASM = tl.constexpr("mov.u32 $0, wanted_rows;")
# How many lanes before this one, and how many of the warp, say yes.
_VOTE_ASM = tl.constexpr(
    "{ .reg .pred p; .reg .b32 m, l; setp.ne.s32 p, $2, 0; vote.sync.ballot.b32 m, p, 0xffffffff;"
    "mov.u32 l, %lanemask_lt; and.b32 l, l, m; popc.b32 $0, l; popc.b32 $1, m; }"
)
_STORE_ASM = tl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
_LOAD_ASM = tl.constexpr("ld.shared.b32 $0, [$1];")
_STORE_ROW_ASM = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }"
)
_LOAD_ROW_ASM = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.shared.v2.b32 {$0, $1}, [$2]; }"
)
# The lanes of a pair exchange what they do not keep: the one with its bit set keeps the second.
_HALVE_ASM = tl.constexpr(
    "{ .reg .pred p; .reg .f32 given, kept; setp.ne.s32 p, $3, 0; selp.f32 given, $1, $2, p; selp.f32 kept, $2, $1, p;"
    "shfl.sync.bfly.b32 given, given, $4, 31, 0xffffffff; add.f32 $0, kept, given; }"
)
_SUM_ASM = tl.constexpr("{ .reg .f32 given; shfl.sync.bfly.b32 given, $1, $2, 31, 0xffffffff; add.f32 $0, $1, given; }")
_STORE_SUMS_ASM = tl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")


def walk_options(c: Config, rows: int, lanes: int, skip_zeros: bool) -> dict[str, int | bool]:
    """What a kernel is compiled with to walk so: `rows` rows at a time in `lanes` threads each.

    ROWS and SKIP_ZEROS; EACH, places a thread that are listed at a time, 0: there is no list; SHARED, see `store_sum`.
    """
    threads = rows * lanes
    compiled = threads == 32 * c.warps and not _INTERPRETED
    listed = compiled and c.listed and skip_zeros and c.block_b == 1
    return {
        "SKIP_ZEROS": skip_zeros,
        "ROWS": rows,
        "EACH": min(_MOST_EACH, LIST // threads) if listed else 0,
        "SHARED": bool(compiled and lanes <= 32 and 4 * c.warps * c.block_d <= _BYTES),
    }


@triton.jit
def declare(NEEDED: tl.constexpr):
    """Shared memory for a list and for sums; once in a kernel and outside of loops and branches."""
    if NEEDED:
        tl.inline_asm_elementwise(_DECLARE_ASM, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def list_address(like):
    """Of the list, in the layout of the int32 `like`, a tensor or a number."""
    return tl.inline_asm_elementwise(_ADDRESS_ASM, "=r,r", [like], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def first_places(share, shares, thread, EACH: tl.constexpr):
    """Of a share's first EACH places a thread the very first, the threads' first, and how far it is to the next ones.

    Runs of a few places belong to the shares in turn. Those of a thread differ by a constant, so they have one address.
    """
    first = share * (_RUN * EACH)
    start = first + thread // _RUN * (shares * (_RUN * EACH)) + thread % _RUN
    return first, start, shares * (thread.shape[0] * EACH)


@triton.jit
def ask_places(h_ptr, idx_ptr, start, end, GROUP: tl.constexpr, EACH: tl.constexpr):
    """Rows and h [threads] of such places: two tuples; from `end` on h is 0."""
    rows, h = (), ()
    for e in tl.static_range(EACH):
        place = start + e * _RUN
        if GROUP == 1:
            row = tl.load(idx_ptr + start + e * _RUN, mask=place < end, other=0)
        else:
            row = tl.load(idx_ptr + place // GROUP, mask=place < end, other=0) * GROUP + place % GROUP
        rows = rows + (row,)
        h = h + (tl.load(h_ptr + start + e * _RUN, mask=place < end, other=0.0).to(tl.float32),)
    return rows, h


@triton.jit
def list_wanted(rows, h, start, end, thread, EACH: tl.constexpr):
    """Write what of `ask_places` is below `end` and whose h is not zero to the list; how many that are.

    Nothing may be left to read of the list before, but for what other warps still read.
    """
    THREADS: tl.constexpr = thread.shape[0]
    WARPS: tl.constexpr = THREADS // 32
    wanted, before = (), ()
    count = tl.zeros_like(thread)
    for e in tl.static_range(EACH):
        yes = ((start + e * _RUN < end) & (h[e] != 0.0)).to(tl.int32)
        lower, of_warp = tl.inline_asm_elementwise(
            _VOTE_ASM, "=&r,=&r,r", [yes], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
        wanted, before = wanted + (yes,), before + (count + lower,)
        count += of_warp
    # All lanes write the same.
    counts = list_address(thread) + 8 * _LIST
    tl.inline_asm_elementwise(
        _STORE_ASM, "=r,r,r", [counts + thread // 32 * 4, count], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    first, total = tl.zeros_like(thread), 0
    counts = list_address(tl.program_id(0)) + 8 * _LIST
    for warp in tl.static_range(WARPS):
        number = tl.inline_asm_elementwise(
            _LOAD_ASM, "=r,r", [counts + 4 * warp], dtype=tl.int32, is_pure=False, pack=1
        )
        first += tl.where(thread // 32 > warp, number, 0)
        total += number
    slots = list_address(thread) + 8 * first
    for e in tl.static_range(EACH):
        tl.inline_asm_elementwise(
            _STORE_ROW_ASM, "=r,r,r,f,r", [slots + 8 * before[e], rows[e], h[e], wanted[e]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()
    return total


@triton.jit
def ask(
    h_ptr, idx_ptr, listed, place, end, first_b, B, stride_h_b,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Units and h of STEPS times ROWS places, from `place` [threads] on: two tuples, h of all tokens of a step.

    With LISTED of places in the list at address `listed`, whose units are rows.
    """
    units, h = (), ()
    # Pointers first, and what is the same for all threads last: addresses of neighbouring steps differ by a constant.
    for u in tl.static_range(STEPS):
        at = place + u * ROWS
        if LISTED:
            row, factor = tl.inline_asm_elementwise(
                _LOAD_ROW_ASM, "=&r,=&f,r,r", [listed + place * 8 + u * ROWS * 8, (at < end).to(tl.int32)],
                dtype=(tl.int32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
            units, h = units + (row,), h + (factor,)
        else:
            idx_ptrs = idx_ptr + place + u * ROWS if GROUP == 1 else idx_ptr + at // GROUP
            units = units + (tl.load(idx_ptrs, mask=at < end, other=0),)
            for b in tl.static_range(BLOCK_B):
                end_b = end
                if b > 0:
                    end_b = tl.where(first_b + b < B, end, 0)
                h_ptrs = h_ptr + (first_b + b) * stride_h_b + place + u * ROWS
                h = h + (tl.load(h_ptrs, mask=at < end_b, other=0.0),)
    return units, h


@triton.jit
def cut(h, place, rows, BLOCK_B: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """h from `ask`, zero from place `rows` on."""
    out = ()
    for u in tl.static_range(STEPS):
        for b in tl.static_range(BLOCK_B):
            out = out + (tl.where(place + u * ROWS < rows, h[u * BLOCK_B + b], 0.0),)
    return out


@triton.jit
def row_and_mask(
    units, h, place, rows, u,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Of step u: numbers of rows, int64, and whether some token wants them."""
    at = place + u * ROWS
    mask = at < rows
    # In 64 bits: one multiply-add to a pointer.
    row = units[u].to(tl.int64)
    if not LISTED:
        row = row * GROUP + at % GROUP
        if SKIP_ZEROS:
            wanted = h[u * BLOCK_B] != 0.0
            for b in tl.static_range(1, BLOCK_B):
                wanted |= h[u * BLOCK_B + b] != 0.0
            mask = mask & wanted
    return row, mask


@triton.jit
def _halve(parts, thread, lanes):
    """Add up, with those of the lane whose number differs in the bit `lanes`, half of the columns, one at least."""
    N: tl.constexpr = len(parts)
    lanes = tl.zeros_like(thread) + lanes
    out = ()
    if N == 1:
        y = tl.inline_asm_elementwise(_SUM_ASM, "=&f,f,r", [parts[0], lanes], dtype=tl.float32, is_pure=False, pack=1)
        out = (y,)
    else:
        for i in tl.static_range(N // 2):
            y = tl.inline_asm_elementwise(
                _HALVE_ASM, "=f,f,f,r,r", [parts[i], parts[i + N // 2], thread & lanes, lanes],
                dtype=tl.float32, is_pure=False, pack=1,
            )  # fmt: skip
            out = out + (y,)
    return out


@triton.jit
def store_sum(
    parts, y_ptr, end, thread,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    N: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Add up over the ROWS rows and store a strip's columns from y_ptr on, those before `end`.

    parts   N tensors [ROWS * LANES], a tuple, one for each column of a thread
    SHARED  by way of the list's memory, which is not read any more
    """
    THREADS: tl.constexpr = ROWS * LANES
    BLOCK_D: tl.constexpr = LANES * N
    if SHARED:
        KEPT: tl.constexpr = max(1, N * LANES // 32)
        kept = parts
        for step in tl.static_range(5):
            if 16 >> step >= LANES:
                kept = _halve(kept, thread, 16 >> step)
        column = thread % LANES * N + thread % 32 // LANES * N // (32 // LANES)
        memory = list_address(thread)
        to = memory + (thread // 32 * BLOCK_D + column) * 4
        tl.debug_barrier()
        if KEPT % 4 == 0:
            for i in tl.static_range(0, KEPT, 4):
                tl.inline_asm_elementwise(
                    _STORE_SUMS_ASM, "=r,r,f,f,f,f", [to + 4 * i, kept[i], kept[i + 1], kept[i + 2], kept[i + 3]],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
        else:
            for i in tl.static_range(KEPT):
                tl.inline_asm_elementwise(
                    _STORE_ASM, "=r,r,f", [to + 4 * i, kept[i]], dtype=tl.int32, is_pure=False, pack=1
                )
        tl.debug_barrier()
        for first in tl.static_range(0, BLOCK_D, THREADS):
            offs = first + thread
            y = tl.zeros(thread.shape, dtype=tl.float32)
            for warp in tl.static_range(THREADS // 32):
                y += tl.inline_asm_elementwise(
                    _LOAD_ASM, "=f,r", [memory + (warp * BLOCK_D + offs % BLOCK_D) * 4],
                    dtype=tl.float32, is_pure=False, pack=1,
                )  # fmt: skip
            tl.store(y_ptr + offs, y, mask=offs < tl.minimum(end, BLOCK_D))
    else:
        y = tl.sum(tl.reshape(join_all(parts, N), (ROWS, BLOCK_D)), axis=0)
        offs = tl.arange(0, BLOCK_D)
        tl.store(y_ptr + offs, y, mask=offs < end)


@triton.jit
def split_all(x, N: tl.constexpr):
    """The columns of x [n, N], N a power of 2, as a tuple."""
    LOG: tl.constexpr = N.bit_length() - 1
    if N == 1:
        return (tl.reshape(x, (x.shape[0],)),)
    else:
        parts = (x,)
        # What is split off first is the lowest bit of the place.
        for step in tl.static_range(LOG):
            even, odd = (), ()
            for i in tl.static_range(2**step):
                part = parts[i]
                if step < LOG - 1:
                    part = tl.reshape(part, (x.shape[0], N >> (step + 1), 2))
                low, high = tl.split(part)
                even, odd = even + (low,), odd + (high,)
            parts = even + odd
        return parts
