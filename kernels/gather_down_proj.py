"""Gathered down-projection: y = sum over the kept rows n of h[:, n] * w[n].

The second half of a sparse layer (Deja Vu, Liu et al. 2023, arXiv:2310.17157): fc2 of the kept neurons, or out_proj of
the kept heads. The weight is stored transposed, row n being what unit n adds to the output, so that what is kept is
contiguous. A unit is `group` consecutive rows: 1 for a neuron, head_dim for a head.

ReLU leaves exact zeros among the kept neurons. With `skip_zeros` a row whose h is zero for all tokens of a tile (16 at
most) is not loaded, so a NaN or infinity in it does not matter, whereas 0 * inf would be NaN in a dense layer.

The kept rows are split over the second axis of the grid and the partial sums added in a fixed order by a second
kernel: no atomics, the same bits in every run. The number of splits follows from the shapes; how many rows a split
takes follows from the count, which is read from device memory (a CUDA graph can be replayed with another count).

Shapes (B tokens, D hidden size, cap = idx.numel(), K = count kept units):
    h      [B, cap * group] contiguous; columns from K * group on are never read
    w      [N * group, D]   contiguous
    idx    [cap]            int32, 0 <= idx[:K] < N, any order; values are not checked (it would sync)
    count  [1]              int32, 0 <= K <= cap
    y      [B, D]           dtype of h, accumulated in fp32; zeros if K = 0
Column s * group + j of h belongs to row idx[s] * group + j of w.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.gather_up_proj import take_units


def gather_down_proj_ref(
    h: torch.Tensor,
    w: torch.Tensor,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
) -> torch.Tensor:
    """Plain torch twin of `gather_down_proj`: same arguments, same result, rounded where torch rounds.

    With `skip_zeros` its tile is the whole batch.
    """
    K = int(count)
    h = h[:, : K * group]
    if not skip_zeros:
        return h @ take_units(w, idx[:K], group)
    nonzero = (h != 0).any(dim=0).nonzero().squeeze(1)
    rows = idx[nonzero // group] * group + nonzero % group
    return h.index_select(1, nonzero) @ w.index_select(0, rows)


# Wide in D for bandwidth, a few rows deep so that several loads are in flight. The fp32 accumulator holds
# BLOCK_B * BLOCK_N * BLOCK_D <= 8192 elements, 64 registers a thread of 4 warps.
# BLOCK_B -> (BLOCK_N, BLOCK_D)
_BLOCKS = {1: (8, 512), 2: (8, 512), 4: (4, 512), 8: (4, 256), 16: (4, 128)}
# Enough programs for several on every multiprocessor, but no split with fewer rows than its partial sum is worth.
_PROGRAMS = 512
_MIN_ROWS_PER_SPLIT = 64
_MAX_SPLITS = 64
_BLOCK_D_REDUCE = 128


# B and the capacity are not specialised: another batch must not compile again.
@triton.jit(do_not_specialize=["B", "stride_h_b", "SPLITS"])
def _gather_down_proj_kernel(
    h_ptr, w_ptr, idx_ptr, count_ptr, out_ptr,
    B, D, stride_h_b, SPLITS,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    rows = tl.load(count_ptr) * GROUP
    share = tl.cdiv(tl.cdiv(rows, SPLITS), BLOCK_N) * BLOCK_N
    first = split * share
    end = tl.minimum(first + share, rows)

    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    offs_b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    token = offs_b.to(tl.int64)

    # All tiles are loaded in the shape of acc, so that no operand changes its layout inside the loop.
    acc = tl.zeros((BLOCK_B, BLOCK_N, BLOCK_D), dtype=tl.float32)
    for n in range(first, end, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < end
        unit = tl.load(idx_ptr + offs_n // GROUP, mask=mask_n, other=0).to(tl.int64)
        row = unit * GROUP + offs_n % GROUP
        # [BLOCK_B, BLOCK_N, 1]
        h = tl.load(
            h_ptr + token[:, None, None] * stride_h_b + offs_n[None, :, None],
            mask=mask_b[:, None, None] & mask_n[None, :, None],
            other=0.0,
        ).to(tl.float32)
        mask_w = mask_n[None, :, None]
        if SKIP_ZEROS:
            mask_w = mask_w & (tl.max((h != 0.0).to(tl.int32), axis=0, keep_dims=True) > 0)
        # [1, BLOCK_N, BLOCK_D]; weights stream past the L2 cache
        w = tl.load(
            w_ptr + row[None, :, None] * D + offs_d[None, None, :],
            mask=mask_w & mask_d[None, None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        acc += h * w

    y = tl.sum(acc, axis=1)  # [BLOCK_B, BLOCK_D]
    out_ptrs = out_ptr + (split.to(tl.int64) * B + token[:, None]) * D + offs_d[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_b[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["B"])
def _sum_splits_kernel(
    part_ptr, y_ptr,
    B, D,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    offs_s = tl.arange(0, BLOCK_S).to(tl.int64)
    # [BLOCK_S, BLOCK_D]
    part = tl.load(
        part_ptr + (offs_s[:, None] * B + token) * D + offs_d[None, :],
        mask=(offs_s < SPLITS)[:, None] & mask_d[None, :],
        other=0.0,
    )
    y = tl.sum(part, axis=0)
    tl.store(y_ptr + token * D + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)


def _splits(rows_cap: int, programs_per_split: int) -> int:
    wanted = min(triton.cdiv(_PROGRAMS, programs_per_split), _MAX_SPLITS)
    return max(1, min(wanted, rows_cap // _MIN_ROWS_PER_SPLIT))


def gather_down_proj(
    h: torch.Tensor,
    w: torch.Tensor,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
) -> torch.Tensor:
    """Return the sum over the kept rows of h[:, n] * w[n]; shapes and limits are in the module docstring.

    Each kept row of `w` is read once for every 16 tokens.

    Raises:
        ValueError: wrong shapes, a `group` that does not divide the rows, or tensors that are not contiguous.
        TypeError: h and w of different dtypes, or idx or count not int32.
    """
    if h.dim() != 2 or w.dim() != 2:
        raise ValueError(f"expected h [B, cap * group] and w [rows, D], got {tuple(h.shape)} and {tuple(w.shape)}")
    if group < 1 or w.shape[0] % group:
        raise ValueError(f"group must divide the {w.shape[0]} rows of w, got {group}")
    if idx.dim() != 1 or count.shape != (1,):
        raise ValueError(f"expected idx [cap] and count [1], got {tuple(idx.shape)} and {tuple(count.shape)}")
    if h.shape[1] != idx.numel() * group:
        raise ValueError(
            f"h must have cap * group = {idx.numel()} * {group} = {idx.numel() * group} columns, got {h.shape[1]}"
        )
    if h.dtype != w.dtype:
        raise TypeError(f"h and w must share one dtype, got {h.dtype} and {w.dtype}")
    if idx.dtype != torch.int32 or count.dtype != torch.int32:
        raise TypeError(f"idx and count must be int32, got {idx.dtype} and {count.dtype}")
    if not all(t.is_contiguous() for t in (h, w, idx)):
        raise ValueError("h, w and idx must be contiguous; call .contiguous() once at load time, not per step")

    B, D = h.shape[0], w.shape[1]
    block_b = min(16, triton.next_power_of_2(B))
    block_n, block_d = _BLOCKS[block_b]
    block_d = min(block_d, triton.next_power_of_2(D))
    tiles_d, tiles_b = triton.cdiv(D, block_d), triton.cdiv(B, block_b)
    splits = _splits(h.shape[1], tiles_d * tiles_b)
    y = torch.empty(B, D, device=h.device, dtype=h.dtype)
    part = y if splits == 1 else torch.empty(splits, B, D, device=h.device, dtype=torch.float32)
    _gather_down_proj_kernel[(tiles_d, splits, tiles_b)](
        h, w, idx, count, part,
        B, D, h.shape[1], splits,
        GROUP=group,
        SKIP_ZEROS=skip_zeros,
        BLOCK_B=block_b,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
    )  # fmt: skip
    if splits > 1:
        block_d = min(_BLOCK_D_REDUCE, triton.next_power_of_2(D))
        block_s = triton.next_power_of_2(splits)
        grid = (triton.cdiv(D, block_d), B)
        _sum_splits_kernel[grid](part, y, B, D, SPLITS=splits, BLOCK_S=block_s, BLOCK_D=block_d)
    return y
