"""What the kernels share: how a launch begins, products of rows, and the wait for the last program."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter multiplies the bit patterns of bf16 in a dot, and knows no launches.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@cache
def _starts_early(device: int) -> bool:
    return not _INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options() -> dict[str, bool]:
    """Of every launch: it may begin while the one before it ends (programmatic dependent launch), see `await_inputs`.

    From compute capability 9.0 on. But for `let_in` nothing tells the next launch to begin sooner than the last program
    of the one before is done: programs that came in while others still run would crowd on the first free
    multiprocessors.
    """
    return {"EARLY": True, "launch_pdl": True} if _starts_early(_device()) else {"EARLY": False}


def _device() -> int:
    return -1 if _INTERPRETED else torch.cuda.current_device()


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """The first thing in every kernel: what earlier launches wrote is there after it, what they read may be written.

    Every program waits, also one that has nothing to do: a kernel that is over vouches for those before it.
    """
    if EARLY:
        gdc_wait()


@triton.jit
def let_in(EARLY: tl.constexpr):
    """Behind `await_inputs`, in a launch that leaves the device idle: the next one may begin now and load weights.

    What the next one loads before its own `await_inputs` must be older than this launch.
    """
    if EARLY:
        gdc_launch_dependents()


def row_block(D: int, most: int) -> int:
    """Widest power of 2 up to `most` that divides D, so that rows of D elements need no mask; else one that covers."""
    block = most
    while block > 1 and D % block:
        block //= 2
    # Narrow tiles waste more than masked ones.
    return block if block >= min(most, 128) else min(most, triton.next_power_of_2(D))


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32; exact products of fp32 inputs, not TF32.

    Interpreted it is numpy's product, which adds up in an order that depends, on some processors, on where in the
    matrix a row stands: in fp64 that is not seen in what is rounded to fp32.
    """
    if _INTERPRETED:
        a = a.to(tl.float32).to(tl.float64)
        b = b.to(tl.float32).to(tl.float64)
        acc = tl.dot(a, b, acc.to(tl.float64), input_precision="ieee", out_dtype=tl.float64).to(tl.float32)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def load_tile(w_ptr, w_row, mask_w, d: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[1, rows, BLOCK_D] of rows `w_row`, int64, from column d on. Weights pass through the L1 cache."""
    offs_d = d + tl.arange(0, BLOCK_D)
    mask = mask_w[None, :, None]
    if D % BLOCK_D != 0:
        mask = mask & (offs_d < D)[None, None, :]
    w_ptrs = w_ptr + w_row[None, :, None] * D + offs_d[None, None, :]
    return tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def first_tiles(w_ptr, w_row, mask_w, TILES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first TILES tiles, a tuple, for `rows_times_rows`."""
    out = ()
    for i in tl.static_range(TILES):
        out = out + (load_tile(w_ptr, w_row, mask_w, i * BLOCK_D, D, BLOCK_D),)
    return out


@triton.jit
def rows_times_rows(
    x_ptr, x_row, mask_x, w_ptr, w_row, mask_w, first,
    D: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_X, BLOCK_W] fp32: rows `x_row` of x [., D] times rows `w_row` of w [., D], both int64.

    first: of the rows of w what `first_tiles` has loaded, or ().
    DOT takes tensor cores (BLOCK_X and BLOCK_W of at least 16), for more tokens than multiply-adds can keep up with.
    """
    if DOT:
        y = tl.zeros((BLOCK_X, BLOCK_W), dtype=tl.float32)
        for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            offs_d = d + tl.arange(0, BLOCK_D)
            mask_x_tile = mask_x[:, None]
            mask_w_tile = mask_w[:, None]
            if D % BLOCK_D != 0:
                mask_x_tile = mask_x_tile & (offs_d < D)[None, :]
                mask_w_tile = mask_w_tile & (offs_d < D)[None, :]
            w = tl.load(w_ptr + w_row[:, None] * D + offs_d[None, :], mask=mask_w_tile, other=0.0)
            x = tl.load(x_ptr + x_row[:, None] * D + offs_d[None, :], mask=mask_x_tile, other=0.0)
            y = dot(x, tl.trans(w), y)
    else:
        # What a thread loads at once, 16 bytes of a row, it sums at once; across threads the sum is made once at the
        # end, since in every step it would cost more than the products. All tiles are loaded in one shape, so that no
        # operand changes its layout. Unrolled, so that the loads of several tiles are in flight at once.
        LANE: tl.constexpr = min(BLOCK_D, 128 // w_ptr.dtype.element_ty.primitive_bitwidth)
        acc = tl.zeros((BLOCK_X, BLOCK_W, BLOCK_D // LANE), dtype=tl.float32)
        for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
            offs_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
            mask_x_tile = mask_x[:, None, None]
            if D % BLOCK_D != 0:
                mask_x_tile = mask_x_tile & (offs_d < D)[None, None, :]
            w = first[i] if i < len(first) else load_tile(w_ptr, w_row, mask_w, i * BLOCK_D, D, BLOCK_D)
            # [BLOCK_X, 1, BLOCK_D], which stays in the L1 cache
            x = tl.load(x_ptr + x_row[:, None, None] * D + offs_d[None, None, :], mask=mask_x_tile, other=0.0).to(
                tl.float32
            )
            products = x * w.to(tl.float32)
            acc += tl.sum(tl.reshape(products, (BLOCK_X, BLOCK_W, BLOCK_D // LANE, LANE)), axis=3)
        y = tl.sum(acc, axis=2)
    return y


@triton.jit
def is_last(ticket_ptr, programs):
    """Whether this is the last of `programs` programs to come here; the counter is left at zero for the next launch.

    What the others stored before is then to be seen, by loads that do not stop at this multiprocessor's own cache
    (cache_modifier=".cg").
    """
    tl.debug_barrier()  # all threads' stores, before the one thread that takes the ticket
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last
