"""Products of packed rows that several kernels over 4-bit rows share, as `tiles.rows_times_rows` is for 16 bit."""

import triton
import triton.language as tl

from dejavu_ds.kernels.nibbles import WORD, decode, decode_bytes, decode_pairs, load_masked, scales, split_pairs
from dejavu_ds.kernels.tiles import dot

_WORD = tl.constexpr(WORD)
# Each pair of a word times its pair of x, in half precision; the two sums of 8 products are added in fp32.
_DOT_ASM = tl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 s, t; .reg .f32 f, g;\n"
    "mul.rn.f16x2 s, $1, $9; mul.rn.f16x2 t, $2, $10;\n"
    + "".join(f"fma.rn.f16x2 {'st'[i % 2]}, ${1 + i}, ${9 + i}, {'st'[i % 2]};\n" for i in range(2, 8))
    + "add.rn.f16x2 s, s, t; mov.b32 {a, b}, s; cvt.f32.f16 f, a; cvt.f32.f16 g, b; add.f32 $0, f, g; }"
)


@triton.jit
def stack(numbers, N: tl.constexpr):
    """A tuple of N numbers as a tensor [N]."""
    offs = tl.arange(0, N)
    out = tl.zeros((N,), numbers[0].dtype)
    for i in tl.static_range(N):
        out = tl.where(offs == i, numbers[i], out)
    return out


@triton.jit
def _four(x):
    """The 4 columns of x [n, 4], in order."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _columns(x_ptrs, mask):
    """8 or 4 columns, neighbours in memory, as a tuple; x_ptrs [n] of the first ones, mask [n] or None."""
    WIDTH: tl.constexpr = 16 * 8 // x_ptrs.dtype.element_ty.primitive_bitwidth
    ptrs = x_ptrs[:, None] + tl.arange(0, WIDTH)[None, :]
    x = load_masked(ptrs, None if mask is None else mask[:, None])
    if WIDTH == 4:
        out = _four(x)
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], 4, 2)))
        a = _four(even)
        b = _four(odd)
        out = (a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3])
    return out


@triton.jit
def join_all(parts, N: tl.constexpr):
    """N tensors [n] of a tuple as [n, N], N a power of 2."""
    LOG: tl.constexpr = N.bit_length() - 1
    # The first to be joined is the highest bit of the place.
    for step in tl.static_range(LOG):
        joined = ()
        for i in tl.static_range(N >> (step + 1)):
            joined = joined + (tl.join(parts[i], parts[i + (N >> (step + 1))]),)
        parts = joined
    return tl.reshape(parts[0], (parts[0].shape[0], N))


@triton.jit
def _load_x(x_ptrs, mask, ASM: tl.constexpr):
    """16 elements from x_ptrs [n] on: for a compiled lookup 8 int32 of two each, else 16 of their dtype."""
    out = ()
    if ASM == "":
        WIDTH: tl.constexpr = 16 * 8 // x_ptrs.dtype.element_ty.primitive_bitwidth
        for first in tl.static_range(0, _WORD, WIDTH):
            out = out + _columns(x_ptrs + first, mask)
    else:
        x_ptrs = x_ptrs.to(tl.pointer_type(tl.int32))
        out = _columns(x_ptrs, mask) + _columns(x_ptrs + 4, mask)
    return out


@triton.jit
def _sum_word(q, x, table, dtype: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Sums over the elements of words q [n], without their scales, times x of each token from `_load_x`: [n] fp32."""
    out = ()
    if HALF:
        w = decode_pairs(q, table)
        for b in tl.static_range(len(x)):
            v = x[b]
            y = tl.inline_asm_elementwise(
                _DOT_ASM, "=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]],
                dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
            out = out + (y,)
    else:
        w = decode(q, table, ASM)
        for b in tl.static_range(len(x)):
            y = tl.zeros(q.shape, dtype=tl.float32)
            if ASM == "":
                for i in tl.static_range(_WORD):
                    y += w[i] * x[b][i].to(tl.float32)
            else:
                for i in tl.static_range(_WORD // 2):
                    if dtype == tl.float16:
                        low, high = split_pairs(x[b][i])
                    else:
                        low = (x[b][i] << 16).to(tl.float32, bitcast=True)
                        high = (x[b][i] & -65536).to(tl.float32, bitcast=True)
                    y += w[2 * i] * low
                    y += w[2 * i + 1] * high
            out = out + (y,)
    return out


@triton.jit
def tokens_from(first, tokens, N: tl.constexpr):
    """Numbers first .. first + N - 1 of tokens, a tuple; the last token in place of those that are not there."""
    out = ()
    for b in tl.static_range(N):
        out = out + (tl.minimum(first + b, tokens - 1) if N > 1 else first,)
    return out


@triton.jit
def load_tokens(x_ptr, tokens, D: tl.constexpr, BLOCK_D: tl.constexpr, ASM: tl.constexpr):
    """Rows `tokens`, numbers in a tuple, of x [., D], a word of each of their tiles of BLOCK_D elements a thread.

    A tuple by tiles, tokens, and what `_load_x` gives. It stays in registers while a program walks over rows.
    """
    BLOCK: tl.constexpr = BLOCK_D // _WORD
    out = ()
    for d in tl.static_range(0, D // _WORD, BLOCK):
        offs = d + tl.arange(0, BLOCK)
        mask = None
        if (D // _WORD) % BLOCK != 0:
            mask = offs < D // _WORD
        x = ()
        for b in tl.static_range(len(tokens)):
            x = x + (_load_x(x_ptr + tokens[b] * D + offs * _WORD, mask, ASM),)
        out = out + (x,)
    return out


@triton.jit
def load_row(
    w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, row,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Words and scales of a packed row, a number in int64: two tuples by tiles.

    Scales beyond the end of a row are zero, words there anything. All tensors have one dimension, a word a thread, so
    that all that belongs together lies in one layout.
    """
    WORDS: tl.constexpr = D // _WORD
    BLOCK: tl.constexpr = BLOCK_D // _WORD
    q, absmax = (), ()
    offs = tl.arange(0, BLOCK)
    for d in tl.static_range(0, WORDS, BLOCK):
        mask = None
        if WORDS % BLOCK != 0:
            mask = offs + d < WORDS
        # The row's place is added last: one multiply-add to a pointer, and a constant from tile to tile.
        q = q + (load_masked(w_ptr + offs + (row * WORDS + d), mask),)
        column = (offs + d % (BLOCKSIZE // 16)) // (BLOCKSIZE // 16)
        first = row * (D // BLOCKSIZE) + d // (BLOCKSIZE // 16)
        absmax = absmax + (scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, column, first, mask),)
    return q, absmax


@triton.jit
def sum_row(
    q, absmax, x, table,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Each token of x from `load_tokens` times the row q, absmax from `load_row`: what a thread has of it,
    [n] fp32.

    By multiply-adds. Words are summed at once, with HALF in half precision.
    """
    TILES: tl.constexpr = len(x)
    acc = ()
    for d in tl.static_range(TILES):
        part = _sum_word(q[d], x[d], table, dtype, HALF, ASM)
        new = ()
        for b in tl.static_range(len(part)):
            term = part[b] * absmax[d]
            new = new + (acc[b] + term if d > 0 else term,)
        acc = new
    return acc


@triton.jit
def sum_threads(sums, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr):
    """[BLOCK_X, BLOCK_W] fp32 of what `sum_row` gave for BLOCK_W rows: the sum across threads, once for all rows."""
    y = tl.sum(join_all(sums, BLOCK_W * BLOCK_X), axis=0)
    return tl.trans(tl.reshape(y, (BLOCK_W, BLOCK_X)))


@triton.jit
def packed_rows_dot(
    x_ptr, x_row, mask_x, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, w_row, mask_w,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """[BLOCK_X, BLOCK_W] fp32: rows `x_row` of x [., D] times packed rows `w_row`, by tensor cores, a block at a time.

    What is multiplied is the table's values in the dtype of x; the scale of the block follows in fp32.
    """
    BYTES: tl.constexpr = BLOCKSIZE // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8))
    y = tl.zeros((BLOCK_X, BLOCK_W), dtype=tl.float32)
    for block in tl.range(0, D // BLOCKSIZE, num_stages=STAGES):
        offs_p = block * BYTES + tl.arange(0, BYTES)
        p = tl.load(w_ptr + w_row[:, None] * (D // 2) + offs_p[None, :], mask=mask_w[:, None], other=0)
        first = w_row * (D // BLOCKSIZE)
        absmax = scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, block, first, mask_w)
        offs_d = block * BLOCKSIZE + tl.arange(0, BLOCKSIZE)
        x = tl.load(x_ptr + x_row[:, None] * D + offs_d[None, :], mask=mask_x[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(x, (BLOCK_X, BYTES, 2)))
        high, low = decode_bytes(p, table, dtype, ASM)
        part = dot(even, tl.trans(high), tl.zeros((BLOCK_X, BLOCK_W), dtype=tl.float32))
        part = dot(odd, tl.trans(low), part)
        y += part * absmax[None, :]
    return y
