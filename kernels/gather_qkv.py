"""Query, key and value of the kept heads, and the keys and values that these heads have missed.

A head that is not selected writes no keys and values. Deja Vu (Liu et al. 2023, arXiv:2310.17157, section 4.2) keeps
the attention input of such tokens and computes what is missing when the head is next selected. Its key and value rows
are read for the new token anyway, so a short run of missed tokens costs arithmetic but no weight traffic here. Longer
runs, and heads that must be recovered without being selected, are `recover_kv`'s.

What a head misses is one run of positions, watermark[h] to t - 1. A recovered key or value has the same bits as if it
had been computed in its own step by this kernel.

Shapes (B tokens, H heads, D hidden size, R ring length, T cache capacity, cap = idx.numel(), K = count kept heads):
    x      [B, D]               contiguous
    w      [H, 3, head_dim, D]  contiguous; query, key and value rows of each head
    b      [H, 3, head_dim]     contiguous, or None
    idx    [cap]                int32, 0 <= idx[:K] < H, distinct; values are not checked (it would sync)
    count  [1]                  int32, 0 <= K <= cap
    qkv    [B, cap, 3, head_dim]  dtype of x, accumulated in fp32; slots from K on are unspecified
Of `Missed`:
    inputs     [B, R, D]            contiguous; normalised attention input of position p at p % R
    watermark  [H]                  int32: keys and values of positions below it are there
    position   [1]                  int32, t, the position being decoded
    k_cache    [B, H, T, head_dim]  contiguous, dtype of x; slots watermark .. t - 1 are written
    v_cache    [B, H, T, head_dim]  likewise
    at_most    runs of up to so many tokens are computed; those of longer ones are already in the caches
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config, config_for
from dejavu_ds.kernels.gather_up_proj import check_gather, gather_up_proj_ref
from dejavu_ds.kernels.tiles import ask_ahead, await_inputs, launch_options, lines_of, rows_times_rows


class Missed(NamedTuple):
    """Where missed inputs are, and where their keys and values go; see the module docstring."""

    inputs: torch.Tensor
    watermark: torch.Tensor
    position: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    at_most: int


def gather_qkv_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    missed: Missed | None = None,
) -> torch.Tensor:
    """Plain torch twin of `gather_qkv`: same arguments, same result and side effect, rounded where torch rounds."""
    head_dim = w.shape[2]
    bias = None if b is None else b.flatten()
    qkv = gather_up_proj_ref(x, w.flatten(0, 2), bias, idx, count, group=3 * head_dim)
    if missed is not None:
        t = int(missed.position)
        for head in idx[: int(count)].tolist():
            first = int(missed.watermark[head])
            if 0 < t - first <= missed.at_most:
                recover_head_ref(missed.inputs, w[head], None if b is None else b[head], first, t, head, missed)
    return qkv.view(x.shape[0], idx.numel(), 3, head_dim)


def recover_head_ref(inputs, w, b, first: int, t: int, head: int, caches) -> None:
    """K and V of positions first .. t - 1 of a head into k_cache and v_cache of `caches`; w, b: of the head."""
    x = inputs[:, torch.arange(first, t, device=inputs.device) % inputs.shape[1]]  # [B, missing, D]
    for cache, part in ((caches.k_cache, 1), (caches.v_cache, 2)):
        cache[:, head, first:t] = torch.nn.functional.linear(x, w[part], None if b is None else b[part])


@triton.jit
def _store_missed(
    inputs_ptr, w_ptr, b_ptr, cache_ptr, row, mask_n, offs_r, head, first, items, B, H, R, T,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `row` of w, elements offs_r of a head's keys or values, for `items` missed (position, sequence) pairs."""
    for i in range(0, items, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        mask_i = offs_i < items
        batch = (offs_i % B).to(tl.int64)
        pos = (first + offs_i // B).to(tl.int64)
        y = rows_times_rows(
            inputs_ptr, batch * R + pos % R, mask_i, w_ptr, row, mask_n, D, BLOCK_I, BLOCK_N, BLOCK_D, DOT, STAGES
        )
        if HAS_BIAS:
            y += tl.load(b_ptr + row, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        slot = (batch * H + head) * T + pos
        tl.store(
            cache_ptr + slot[:, None] * HEAD_DIM + offs_r[None, :],
            y.to(cache_ptr.dtype.element_ty),
            mask=mask_i[:, None] & mask_n[None, :],
        )


# Batches and capacities are not specialised: another one must not compile again.
@triton.jit(do_not_specialize=["B", "cap", "H", "R", "T", "at_most"])
def _gather_qkv_kernel(
    x_ptr, w_ptr, b_ptr, idx_ptr, count_ptr, y_ptr, inputs_ptr, watermark_ptr, position_ptr, k_ptr, v_ptr,
    B, cap, H, R, T, at_most,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MISSED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # A block of rows lies within one part, query, key or value, of one head.
    BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_N - 1) // BLOCK_N
    if EARLY:
        slot = tl.program_id(0) // (3 * BLOCKS)
        if slot < tl.load(count_ptr, cache_modifier=".cg"):
            head = tl.load(idx_ptr + slot, cache_modifier=".cg").to(tl.int64)
            offs_r = tl.minimum(tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N), HEAD_DIM - 1)
            part = tl.program_id(0) // BLOCKS % 3
            row = (tl.minimum(tl.maximum(head, 0), H - 1) * 3 + part) * HEAD_DIM + offs_r
            ask_ahead(w_ptr, row, D, BLOCK_N, LINES)
    await_inputs(EARLY)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    token = offs_b.to(tl.int64)
    for block in range(tl.program_id(0), tl.load(count_ptr) * (3 * BLOCKS), tl.num_programs(0)):
        slot = block // (3 * BLOCKS)
        part = block // BLOCKS % 3
        head = tl.load(idx_ptr + slot).to(tl.int64)
        offs_r = block % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_r < HEAD_DIM
        row = (head * 3 + part) * HEAD_DIM + offs_r
        y = rows_times_rows(x_ptr, token, mask_b, w_ptr, row, mask_n, D, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES)
        if HAS_BIAS:
            y += tl.load(b_ptr + row, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + ((token[:, None] * cap + slot) * 3 + part) * HEAD_DIM + offs_r[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_b[:, None] & mask_n[None, :])
        if HAS_MISSED:
            first = tl.load(watermark_ptr + head)
            missing = tl.load(position_ptr) - first
            # Of several tiles of tokens the first one's programs do it for all sequences.
            if (part > 0) & (missing > 0) & (missing <= at_most) & (tl.program_id(1) == 0):
                cache_ptr = k_ptr
                if part == 2:
                    cache_ptr = v_ptr
                _store_missed(
                    inputs_ptr, w_ptr, b_ptr, cache_ptr, row, mask_n, offs_r, head, first, missing * B, B, H, R, T,
                    D, HEAD_DIM, HAS_BIAS, BLOCK_I, BLOCK_N, BLOCK_D, DOT, STAGES,
                )  # fmt: skip


def check_missed(missed: Missed, B: int, H: int, head_dim: int, D: int, dtype: torch.dtype) -> None:
    """ValueError or TypeError for tensors that do not fit the module docstring."""
    inputs, watermark, position, k_cache, v_cache, _ = missed
    if inputs.dim() != 3 or inputs.shape[::2] != (B, D):
        raise ValueError(f"inputs must be [{B}, R, {D}], got {tuple(inputs.shape)}")
    if watermark.shape != (H,) or position.shape != (1,):
        raise ValueError(
            f"expected watermark [{H}] and position [1], got {tuple(watermark.shape)} and {tuple(position.shape)}"
        )
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape != (B, H, k_cache.shape[2], head_dim):
        raise ValueError(
            f"k_cache and v_cache must be [{B}, {H}, T, {head_dim}], got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if not inputs.dtype == k_cache.dtype == v_cache.dtype == dtype:
        raise TypeError(f"inputs and caches must be {dtype}, got {inputs.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if not watermark.dtype == position.dtype == torch.int32:
        raise TypeError(f"watermark and position must be int32, got {watermark.dtype} and {position.dtype}")
    if not all(t.is_contiguous() for t in (inputs, watermark, k_cache, v_cache)):
        raise ValueError("inputs, watermark and the caches must be contiguous; allocate them whole")


def _check(x, w, b, idx, count, missed) -> None:
    if x.dim() != 2 or w.dim() != 4 or w.shape[1] != 3 or w.shape[3] != x.shape[1]:
        raise ValueError(
            f"expected x [B, D] and w [H, 3, head_dim, D] with one D, got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if b is not None and b.shape != w.shape[:3]:
        raise ValueError(f"b must be {list(w.shape[:3])}, got {tuple(b.shape)}")
    check_gather(idx, count, w, 1)
    if x.dtype != w.dtype or (b is not None and b.dtype != x.dtype):
        raise TypeError(f"x, w and b must share one dtype, got {x.dtype}, {w.dtype}, {None if b is None else b.dtype}")
    if not all(t.is_contiguous() for t in (x, w, idx) + (() if b is None else (b,))):
        raise ValueError("x, w, b and idx must be contiguous; call .contiguous() once at load time, not per step")
    if missed is not None:
        check_missed(missed, x.shape[0], w.shape[0], w.shape[2], x.shape[1], x.dtype)


def gather_qkv(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    missed: Missed | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Return qkv of the kept heads and store the keys and values that they missed; see the module docstring.

    The watermark is only read: `decode_attention` moves it. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    _check(x, w, b, idx, count, missed)
    (B, D), (H, _, head_dim, _), cap = x.shape, w.shape, idx.numel()
    y = torch.empty(B, cap, 3, head_dim, device=x.device, dtype=x.dtype)
    c = config or config_for("gather_qkv", B, D, x.dtype)
    inputs, watermark, position, k_cache, v_cache, at_most = missed or (None,) * 5 + (0,)
    grid = (min(cap * 3 * triton.cdiv(head_dim, c.block_n), c.programs), triton.cdiv(B, c.block_b))
    _gather_qkv_kernel[grid](
        x, w, b, idx, count, y, inputs, watermark, position, k_cache, v_cache,
        B, cap, H, 0 if missed is None else inputs.shape[1], 0 if missed is None else k_cache.shape[2], at_most,
        D=D,
        HEAD_DIM=head_dim,
        HAS_BIAS=b is not None,
        HAS_MISSED=missed is not None,
        BLOCK_B=c.block_b,
        BLOCK_I=c.block_b,  # of missed inputs: tiles of the same shape add in the same order
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        DOT=c.dot,
        STAGES=c.stages,
        LINES=lines_of(D, x.dtype),
        num_warps=c.warps,
        **launch_options(),
    )  # fmt: skip
    return y
