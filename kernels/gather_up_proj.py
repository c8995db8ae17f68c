"""Gathered up-projection: y = x @ w[rows].T + b[rows], optionally with ReLU, for the rows of the kept units.

Deja Vu (Liu et al. 2023, arXiv:2310.17157) keeps K of the neurons or heads of a block per decode step. Reading only
their rows cuts the weight traffic, which is what bounds decoding, by the density. A unit is `group` consecutive rows:
1 for a neuron of fc1, 3 * head_dim for the query, key and value rows of a head.

The number of kept units is read from device memory: the grid depends on the capacity alone, so the launch can be
captured in a CUDA graph and replayed with another count.

Shapes (B tokens, D hidden size, cap = idx.numel(), K = count kept units):
    x      [B, D]           contiguous
    w      [N * group, D]   contiguous, as nn.Linear stores a weight
    b      [N * group]      contiguous, or None
    idx    [cap]            int32, 0 <= idx[:K] < N, any order; values are not checked (it would sync)
    count  [1]              int32, 0 <= K <= cap
    y      [B, cap * group] dtype of x, accumulated in fp32; columns from K * group on are unspecified
Column s * group + j of y belongs to row idx[s] * group + j of w.
"""

import torch
import triton
import triton.language as tl


def take_units(t: torch.Tensor, idx: torch.Tensor, group: int) -> torch.Tensor:
    """Rows of the units `idx` [K] int32 of `t` [N * group, ...]: [K * group, ...].

    Where that is every unit in order, as in a layer that is kept dense, it is `t` itself: a copy would treble the
    memory traffic.
    """
    if idx.numel() * group == t.shape[0] and bool((idx[1:] > idx[:-1]).all()):
        return t
    return t.unflatten(0, (-1, group)).index_select(0, idx).flatten(0, 1)


def gather_up_proj_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    relu: bool = False,
) -> torch.Tensor:
    """Plain torch twin of `gather_up_proj`: same arguments, same result, rounded where torch rounds."""
    K = int(count)
    bias = None if b is None else take_units(b, idx[:K], group)
    kept = torch.nn.functional.linear(x, take_units(w, idx[:K], group), bias)
    y = torch.empty(x.shape[0], idx.numel() * group, device=x.device, dtype=x.dtype)
    y[:, : K * group] = kept.relu_() if relu else kept
    return y


# A row is D elements long and read once: wide in D for bandwidth, few rows a program for many loads in flight.
# The fp32 accumulator holds BLOCK_B * BLOCK_N * BLOCK_D <= 8192 elements, 64 registers a thread of 4 warps.
# BLOCK_B -> (BLOCK_N, BLOCK_D)
_BLOCKS = {1: (2, 1024), 2: (2, 1024), 4: (2, 1024), 8: (2, 512), 16: (2, 256)}
# Enough programs that each has at most one block at usual densities, few enough that idle ones cost nothing.
_MAX_PROGRAMS = 4096


# B and the capacity are not specialised: another batch must not compile again.
@triton.jit(do_not_specialize=["B", "stride_y_b"])
def _gather_up_proj_kernel(
    x_ptr, w_ptr, b_ptr, idx_ptr, count_ptr, y_ptr,
    B, D, stride_y_b,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.load(count_ptr) * GROUP
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    token = offs_b.to(tl.int64)

    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_N), tl.num_programs(0)):
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < rows
        unit = tl.load(idx_ptr + offs_n // GROUP, mask=mask_n, other=0).to(tl.int64)
        row = unit * GROUP + offs_n % GROUP

        # Summed over D once at the end: a sum across threads in every step would cost more than the products.
        # All tiles are loaded in the shape of acc, so that no operand changes its layout inside the loop.
        acc = tl.zeros((BLOCK_B, BLOCK_N, BLOCK_D), dtype=tl.float32)
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            mask_d = offs_d < D
            # [1, BLOCK_N, BLOCK_D]; weights stream past the L2 cache, x stays in it
            w = tl.load(
                w_ptr + row[None, :, None] * D + offs_d[None, None, :],
                mask=mask_n[None, :, None] & mask_d[None, None, :],
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
            # [BLOCK_B, 1, BLOCK_D]
            x = tl.load(
                x_ptr + token[:, None, None] * D + offs_d[None, None, :],
                mask=mask_b[:, None, None] & mask_d[None, None, :],
                other=0.0,
            ).to(tl.float32)
            acc += x * w

        y = tl.sum(acc, axis=2)  # [BLOCK_B, BLOCK_N]
        if HAS_BIAS:
            y += tl.load(b_ptr + row, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if RELU:
            y = tl.where(y < 0.0, 0.0, y)  # not maximum(): a NaN must stay one
        y_ptrs = y_ptr + token[:, None] * stride_y_b + offs_n[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_b[:, None] & mask_n[None, :])


def gather_up_proj(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    relu: bool = False,
) -> torch.Tensor:
    """Return x @ w[rows].T + b[rows] for the rows of the kept units; shapes and limits are in the module docstring.

    Each kept row of `w` is read once for every 16 tokens.

    Raises:
        ValueError: wrong shapes, a `group` that does not divide the rows, or tensors that are not contiguous.
        TypeError: x, w and b of different dtypes, or idx or count not int32.
    """
    if x.dim() != 2 or w.dim() != 2 or w.shape[1] != x.shape[1]:
        raise ValueError(f"expected x [B, D] and w [rows, D] with one D, got {tuple(x.shape)} and {tuple(w.shape)}")
    if group < 1 or w.shape[0] % group:
        raise ValueError(f"group must divide the {w.shape[0]} rows of w, got {group}")
    if b is not None and b.shape != (w.shape[0],):
        raise ValueError(f"b must be [{w.shape[0]}], one value a row of w, got {tuple(b.shape)}")
    if idx.dim() != 1 or count.shape != (1,):
        raise ValueError(f"expected idx [cap] and count [1], got {tuple(idx.shape)} and {tuple(count.shape)}")
    if x.dtype != w.dtype or (b is not None and b.dtype != x.dtype):
        raise TypeError(f"x, w and b must share one dtype, got {x.dtype}, {w.dtype}, {None if b is None else b.dtype}")
    if idx.dtype != torch.int32 or count.dtype != torch.int32:
        raise TypeError(f"idx and count must be int32, got {idx.dtype} and {count.dtype}")
    if not all(t.is_contiguous() for t in (x, w, idx) + (() if b is None else (b,))):
        raise ValueError("x, w, b and idx must be contiguous; call .contiguous() once at load time, not per step")

    B, D = x.shape
    rows_cap = idx.numel() * group
    y = torch.empty(B, rows_cap, device=x.device, dtype=x.dtype)
    block_b = min(16, triton.next_power_of_2(B))
    block_n, block_d = _BLOCKS[block_b]
    grid = (min(triton.cdiv(rows_cap, block_n), _MAX_PROGRAMS), triton.cdiv(B, block_b))
    _gather_up_proj_kernel[grid](
        x, w, b, idx, count, y,
        B, D, rows_cap,
        GROUP=group,
        HAS_BIAS=b is not None,
        RELU=relu,
        BLOCK_B=block_b,
        BLOCK_N=block_n,
        BLOCK_D=min(block_d, triton.next_power_of_2(D)),
    )  # fmt: skip
    return y
