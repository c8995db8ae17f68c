"""Selection of the units to keep: idx = the n for which any live row has logit[n] > threshold, ascending.

One decode step reads the weights of a unit (an MLP neuron or an attention head) once for the whole batch, so what is
kept is the union over the rows that still generate. A calibrated threshold instead of a top-k makes a unit's fate
independent of the other units, hence of how they are spread over ranks, and costs one comparison (contextual
sparsity: Deja Vu, Liu et al. 2023, arXiv:2310.17157).

The compaction is ordered without atomics: each program counts for itself what is kept before its own block. The
logits are a few hundred kilobytes at most and sit in the L2 cache, so counting again is cheaper than a second launch.

Shapes (B rows, N units):
    logits     [B, N]  float32, float16 or bfloat16, contiguous; compared in fp32; NaN is not kept
    live       [B]     bool, or None when every row is live
    idx_out    [N]     int32; idx_out[:count] is written in ascending order, the rest is unspecified
    count_out  [1]     int32
    mask_out   [N]     bool, the same set in boolean form
"""

import torch
import triton
import triton.language as tl


def select_ref(
    logits: torch.Tensor,
    threshold: float,
    live: torch.Tensor | None,
    idx_out: torch.Tensor,
    count_out: torch.Tensor,
    mask_out: torch.Tensor,
) -> None:
    """Plain torch twin of `select`: same arguments, same result."""
    kept = logits.float() > threshold
    if live is not None:
        kept &= live[:, None]
    torch.any(kept, dim=0, out=mask_out)
    idx = mask_out.nonzero().squeeze(1)
    idx_out[: idx.numel()] = idx
    count_out.fill_(idx.numel())


# One block a program. The recount of what lies before it takes wider strides, to have more loads in flight.
_BLOCK_N = 1024
_BLOCK_RECOUNT = 4096


@triton.jit
def _is_kept(logits_ptr, live_ptr, threshold, offs_n, end, B, N, HAS_LIVE: tl.constexpr, BLOCK: tl.constexpr):
    """1 where n < end and any live row passes the threshold, int32 [BLOCK]."""
    kept = tl.zeros((BLOCK,), dtype=tl.int32)
    for row in range(0, B):
        mask = offs_n < end
        if HAS_LIVE:
            mask = offs_n < tl.where(tl.load(live_ptr + row) != 0, end, 0)
        logit = tl.load(logits_ptr + row * N + offs_n, mask=mask, other=float("-inf")).to(tl.float32)
        kept = kept | (mask & (logit > threshold)).to(tl.int32)
    return kept


@triton.jit(do_not_specialize=["B"])
def _select_kernel(
    logits_ptr, live_ptr, idx_ptr, count_ptr, mask_ptr,
    threshold, B, N,
    HAS_LIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RECOUNT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N

    before = tl.zeros((BLOCK_RECOUNT,), dtype=tl.int32)
    for start in range(0, first, BLOCK_RECOUNT):
        offs_r = start + tl.arange(0, BLOCK_RECOUNT)
        before += _is_kept(logits_ptr, live_ptr, threshold, offs_r, first, B, N, HAS_LIVE, BLOCK_RECOUNT)
    base = tl.sum(before, axis=0)

    offs_n = first + tl.arange(0, BLOCK_N)
    kept = _is_kept(logits_ptr, live_ptr, threshold, offs_n, N, B, N, HAS_LIVE, BLOCK_N)
    slot = base + tl.cumsum(kept, axis=0) - 1
    tl.store(idx_ptr + slot, offs_n, mask=kept != 0)
    tl.store(mask_ptr + offs_n, kept.to(tl.uint8), mask=offs_n < N)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(count_ptr, base + tl.sum(kept, axis=0))


def select(
    logits: torch.Tensor,
    threshold: float,
    live: torch.Tensor | None,
    idx_out: torch.Tensor,
    count_out: torch.Tensor,
    mask_out: torch.Tensor,
) -> None:
    """Write the kept units of `logits` into `idx_out`, `count_out` and `mask_out`; see the module docstring.

    A unit is kept if a live row's logit is strictly above `threshold`; with no live row the count is 0. Nothing is
    read back to the host, so the call can be captured in a CUDA graph (`threshold` is then part of the graph).

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong dtypes.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [B, N], got {tuple(logits.shape)}")
    B, N = logits.shape
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if idx_out.shape != (N,) or count_out.shape != (1,) or mask_out.shape != (N,):
        raise ValueError(
            f"for {N} units, expected idx_out [{N}], count_out [1] and mask_out [{N}], got "
            f"{tuple(idx_out.shape)}, {tuple(count_out.shape)} and {tuple(mask_out.shape)}"
        )
    if idx_out.dtype != torch.int32 or count_out.dtype != torch.int32 or mask_out.dtype != torch.bool:
        raise TypeError(
            "idx_out and count_out must be int32 and mask_out bool, got "
            f"{idx_out.dtype}, {count_out.dtype} and {mask_out.dtype}"
        )
    if live is not None and live.shape != (B,):
        raise ValueError(f"live must be [{B}], one entry a row of logits, got {tuple(live.shape)}")
    if live is not None and live.dtype != torch.bool:
        raise TypeError(f"live must be bool, got {live.dtype}")
    if not all(t.is_contiguous() for t in (logits, idx_out, count_out, mask_out)):
        raise ValueError("logits, idx_out, count_out and mask_out must be contiguous; allocate them once, whole")

    _select_kernel[(triton.cdiv(N, _BLOCK_N),)](
        logits,
        None if live is None else live.contiguous().view(torch.uint8),
        idx_out,
        count_out,
        mask_out.view(torch.uint8),
        float(threshold),
        B,
        N,
        HAS_LIVE=live is not None,
        BLOCK_N=_BLOCK_N,
        BLOCK_RECOUNT=_BLOCK_RECOUNT,
    )
