"""Products of packed rows that several kernels over 4-bit rows share, as `tiles.rows_times_rows` is for 16 bit."""

import triton
import triton.language as tl

from dejavu_ds.kernels.nibbles import WORD, decode, decode_bytes, decode_pairs, load_masked, scales
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
def _load_x(x_ptrs, mask, HALF: tl.constexpr):
    """16 elements from x_ptrs [n] on: with HALF 8 int32 of two each, else 16 of their dtype."""
    out = ()
    if HALF:
        x_ptrs = x_ptrs.to(tl.pointer_type(tl.int32))
        out = _columns(x_ptrs, mask) + _columns(x_ptrs + 4, mask)
    else:
        WIDTH: tl.constexpr = 16 * 8 // x_ptrs.dtype.element_ty.primitive_bitwidth
        for first in tl.static_range(0, _WORD, WIDTH):
            out = out + _columns(x_ptrs + first, mask)
    return out


@triton.jit
def _sum_word(w, x, HALF: tl.constexpr):
    """Sum over a word's elements, w from `decode_pairs` or `decode`, times x from `_load_x`: [n] fp32."""
    if HALF:
        y = tl.inline_asm_elementwise(
            _DOT_ASM, "=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = w[0] * x[0].to(tl.float32)
        for i in tl.static_range(1, _WORD):
            y += w[i] * x[i].to(tl.float32)
    return y


@triton.jit
def packed_rows_times_tokens(
    x_ptr, first_x, tokens, w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, table, w_rows,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """[BLOCK_X, BLOCK_W] fp32: tokens first_x .. of x [tokens, D] times the packed rows in a tuple, by multiply-adds.

    Rows are tensors of one dimension, a word a thread, so that all that belongs together lies in one layout: a word,
    its scale and the 16 elements of x, which serve all rows. Words are summed at once, with HALF in half precision;
    across threads the sum is made once at the end. Unrolled, so that the loads of several tiles are in flight at once.
    """
    WORDS: tl.constexpr = D // _WORD
    BLOCK: tl.constexpr = BLOCK_D // _WORD
    acc = ()
    for _ in tl.static_range(BLOCK_X * BLOCK_W):
        acc = acc + (tl.zeros((BLOCK,), dtype=tl.float32),)
    for d in tl.static_range(0, WORDS, BLOCK):
        offs = d + tl.arange(0, BLOCK)
        mask = None
        if WORDS % BLOCK != 0:
            mask = offs < WORDS
        x = ()
        for b in tl.static_range(BLOCK_X):
            token = tl.minimum(first_x + b, tokens - 1) if BLOCK_X > 1 else first_x
            x = x + (_load_x(x_ptr + token * D + offs * _WORD, mask, HALF),)
        new = ()
        for r in tl.static_range(BLOCK_W):
            # Weights pass through the L1 cache, x stays in it.
            w_ptrs = w_ptr + w_rows[r] * WORDS + offs
            if mask is None:
                q = tl.load(w_ptrs, eviction_policy="evict_first")
            else:
                q = tl.load(w_ptrs, mask=mask, other=0, eviction_policy="evict_first")
            flat = w_rows[r] * (D // BLOCKSIZE) + offs // (BLOCKSIZE // _WORD)
            absmax = scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, flat, mask)
            w = decode_pairs(q, table, ASM) if HALF else decode(q, table, ASM)
            for b in tl.static_range(BLOCK_X):
                new = new + (acc[r * BLOCK_X + b] + _sum_word(w, x[b], HALF) * absmax,)
        acc = new
    offs_x = tl.arange(0, BLOCK_X)
    y = tl.zeros((BLOCK_X, BLOCK_W), dtype=tl.float32)
    for b in tl.static_range(BLOCK_X):
        sums = ()
        for r in tl.static_range(BLOCK_W):
            sums = sums + (tl.sum(acc[r * BLOCK_X + b], axis=0),)
        y = tl.where((offs_x == b)[:, None], stack(sums, BLOCK_W)[None, :], y)
    return y


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
        flat = w_row * (D // BLOCKSIZE) + block
        absmax = scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, flat, mask_w)
        offs_d = block * BLOCKSIZE + tl.arange(0, BLOCKSIZE)
        x = tl.load(x_ptr + x_row[:, None] * D + offs_d[None, :], mask=mask_x[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(x, (BLOCK_X, BYTES, 2)))
        high, low = decode_bytes(p, table, dtype, ASM)
        part = dot(even, tl.trans(high), tl.zeros((BLOCK_X, BLOCK_W), dtype=tl.float32))
        part = dot(odd, tl.trans(low), part)
        y += part * absmax[None, :]
    return y
