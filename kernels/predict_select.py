"""Second layer of a predictor and selection: idx = the n for which a live row has z . w2[n] + b2[n] > threshold.

A decode step reads the weights of a unit (an MLP neuron or an attention head) once for the whole batch, so what is
kept is the union over the rows that still generate. A calibrated threshold instead of a top-k makes a unit's fate
independent of the other units, hence of how they are spread over ranks, and costs one comparison (contextual
sparsity: Deja Vu, Liu et al. 2023, arXiv:2310.17157).

One launch. A program computes the logits of a block of units and stores how many it keeps and, a byte each, the places
of the kept ones among them; the program that finishes last adds up the counts and writes the ascending list. Where a
unit stands in the list is known only after the slowest block, so nothing could be written earlier, and what is left to
do then is little: for 30,000 units seven steps of one program on 30 KB in the L2 cache, each a prefix sum of 64 counts
and one store a kept unit. The prefix sums over the units, the longer part, have been made in all programs at once. A
single program, which heads are enough for as a rule, writes the list itself.

A logit is a sum over r in fp32, never rounded to 16 bit, in an order that follows from r and from whether B is 1, not
from N: a unit's logit has the same bits on every rank and at every tensor-parallel size.

Shapes (B rows, r predictor rank, N units):
    z          [B, r]  output of the first layer after its ReLU; columns of a wider tensor as a rule: unit stride in r
    w2         [N, r]  contiguous, dtype of z; on a 16-byte boundary, on which vector loads and so the order depend
    b2         [N]     dtype of z, or None
    scale      [N]     fp32, with w2 in int8: the weights are w2[n] * scale[n]; or None
    live       [B]     bool, or None when every row is live
    idx_out    [N]     int32; idx_out[:count] is written in ascending order, the rest is unspecified
    count_out  [1]     int32
    mask_out   [N]     bool, the same set in boolean form
    kept_total [1]     int64, raised by the count; or None
    tickets    [>= 1]  int32 zeros that only launches in order share; left zero; None: made for the call
A NaN is not kept, and rows that are not live may hold anything.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.few_tokens import linear
from dejavu_ds.kernels.tiles import await_inputs, dot, is_last, launch_options

_ROW_BYTES = 16


def whole_rank(rank: int, itemsize: int) -> int:
    """The next rank whose rows of w2, of elements of `itemsize` bytes, all begin on 16 bytes.

    Rows that begin elsewhere are loaded element by element.
    """
    return triton.cdiv(rank * itemsize, _ROW_BYTES) * _ROW_BYTES // itemsize


def predict_logits_ref(
    z: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor | None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits [..., N] in fp32 that `predict_select` compares, up to the order of the sum; z [..., r]."""
    if scale is None:
        return linear(z.float(), w2.float(), None if b2 is None else b2.float())
    logits = linear(z.float(), w2.float()) * scale
    return logits if b2 is None else logits + b2.float()


def predict_select_ref(
    z: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    threshold: float,
    live: torch.Tensor | None,
    idx_out: torch.Tensor,
    count_out: torch.Tensor,
    mask_out: torch.Tensor,
    kept_total: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Plain torch twin of `predict_select`: same arguments, same result; needs no tickets."""
    kept = predict_logits_ref(z, w2, b2, scale) > threshold
    if live is not None:
        kept &= live[:, None]
    torch.any(kept, dim=0, out=mask_out)
    idx = mask_out.nonzero().squeeze(1)
    idx_out[: idx.numel()] = idx
    count_out.fill_(idx.numel())
    if kept_total is not None:
        kept_total += idx.numel()


# 64 rows of 256 columns are 32 KB of 16-bit weights in flight, 8 loads of 16 bytes a thread. Guesses, as are the
# constants below; they want measuring.
_BLOCK_N = 64  # at most 128: a place in a block is stored in a byte
_BLOCK_R = 256
_WARPS = 8
# Several rows of z are multiplied by tensor cores, in tiles of 16 rows, with narrower tiles in a pipeline.
_DOT_ROWS = 16
_DOT_BLOCK_R = 128
_DOT_STAGES = 3
# Blocks of _BLOCK_N units that the last program lists in one step. Every program holds the registers for it.
_LIST_BLOCKS = 64


@triton.jit
def _columns(ptrs, r: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Columns r .. r + BLOCK_R - 1 of the rows at `ptrs` [n, 1], zeros from R on: [n, BLOCK_R]."""
    offs_r = r + tl.arange(0, BLOCK_R)[None, :]
    if (r + BLOCK_R) <= R:
        return tl.load(ptrs + offs_r, eviction_policy="evict_first")
    else:
        return tl.load(ptrs + offs_r, mask=offs_r < R, other=0.0, eviction_policy="evict_first")


@triton.jit
def _logits_of_one(
    z_ptr, w_ptrs, first,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N] fp32: rows `w_ptrs` [BLOCK_N, 1] of w2, whose first columns are loaded, times the one row of z."""
    acc = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
    for r in tl.static_range(0, R, BLOCK_R):
        w = first
        if r > 0:
            w = _columns(w_ptrs, r, R, BLOCK_R)
        offs_r = r + tl.arange(0, BLOCK_R)
        z = tl.load(z_ptr + offs_r, mask=offs_r < R, other=0.0)
        acc += w.to(tl.float32) * z.to(tl.float32)[None, :]
    return tl.sum(acc, axis=1)


@triton.jit
def _logits_of_many(
    z_ptrs, w_ptrs,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_B] fp32: rows `w_ptrs` [BLOCK_N, 1] of w2 times rows `z_ptrs` [BLOCK_B, 1] of z."""
    acc = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.float32)
    for r in tl.range(0, R, BLOCK_R, num_stages=STAGES):
        offs_r = r + tl.arange(0, BLOCK_R)[None, :]
        if R % BLOCK_R == 0:
            w = tl.load(w_ptrs + offs_r)
            z = tl.load(z_ptrs + offs_r)
        else:
            w = tl.load(w_ptrs + offs_r, mask=offs_r < R, other=0.0)
            z = tl.load(z_ptrs + offs_r, mask=offs_r < R, other=0.0)
        # By way of fp32, since the interpreter does not know the other way from 8 bits to bf16.
        acc = dot(w.to(tl.float32).to(z.dtype), tl.trans(z), acc)
    return acc


@triton.jit
def _stored(counts_ptr, places_ptr, block, blocks, BLOCK_N: tl.constexpr):
    """What other programs have stored of the blocks [n]: counts [n], places [n, BLOCK_N]; 0 from `blocks` on."""
    exists = block < blocks
    counts = tl.load(counts_ptr + block, mask=exists, other=0, cache_modifier=".cg")
    units = block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return counts, tl.load(places_ptr + units, mask=exists[:, None], other=0, cache_modifier=".cg")


@triton.jit
def _store_count(count_ptr, total_ptr, count, total):
    tl.store(count_ptr, count)
    if total_ptr is not None:
        tl.store(total_ptr, total + count)


@triton.jit
def _list_kept(
    counts_ptr, places_ptr, idx_ptr, count_ptr, total_ptr, total, blocks,
    BLOCK_N: tl.constexpr,
    LIST_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the list and its length, and add that to the total there was."""
    base = 0
    block = tl.arange(0, LIST_BLOCKS)
    counts, places = _stored(counts_ptr, places_ptr, block, blocks, BLOCK_N)
    for _ in range(0, blocks, LIST_BLOCKS):
        # The next step's are on their way while one is worked on.
        next_counts, next_places = _stored(counts_ptr, places_ptr, block + LIST_BLOCKS, blocks, BLOCK_N)
        before = base + tl.cumsum(counts, axis=0) - counts
        units = block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(idx_ptr + before[:, None] + places.to(tl.int32) - 1, units, mask=places != 0)
        base += tl.sum(counts, axis=0)
        block += LIST_BLOCKS
        counts, places = next_counts, next_places
    _store_count(count_ptr, total_ptr, base, total)


# The rank is a size of the model; N must not decide how a program is compiled, nor may the batch compile anew.
@triton.jit(do_not_specialize=["B", "N"])
def _predict_select_kernel(
    z_ptr, w_ptr, scale_ptr, b_ptr, live_ptr, idx_ptr, count_ptr, mask_ptr, total_ptr, counts_ptr, places_ptr,
    tickets_ptr, threshold, B, N, stride_z_b,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    LIST_BLOCKS: tl.constexpr,
    ALONE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    row = tl.minimum(offs_n, N - 1)  # rows that overrun repeat the last one, so that no load of weights is masked
    w_ptrs = w_ptr + row.to(tl.int64)[:, None] * R
    # Weights are there before the wait.
    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if b_ptr is not None:
        bias = tl.load(b_ptr + row).to(tl.float32)
    scale = tl.full((BLOCK_N,), 1.0, dtype=tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row)
    if BLOCK_B == 1:
        first = _columns(w_ptrs, 0, R, BLOCK_R)
    await_inputs(EARLY)
    # Only the program that writes it needs it, but would wait for it last of all.
    total = tl.zeros((), dtype=tl.int64)
    if total_ptr is not None:
        total = tl.load(total_ptr)

    if BLOCK_B == 1:  # B is 1, too
        live = 1
        if live_ptr is not None:
            live = tl.load(live_ptr).to(tl.int32)
        logit = _logits_of_one(z_ptr, w_ptrs, first, R, BLOCK_N, BLOCK_R) * scale + bias
        kept = tl.where(logit > threshold, live, 0)
    else:
        kept = tl.zeros((BLOCK_N,), dtype=tl.int32)
        for b in range(0, B, BLOCK_B):
            offs_b = b + tl.arange(0, BLOCK_B)
            live = (offs_b < B).to(tl.int32)
            if live_ptr is not None:
                live = tl.load(live_ptr + offs_b, mask=offs_b < B, other=0).to(tl.int32)
            z_ptrs = z_ptr + tl.minimum(offs_b, B - 1).to(tl.int64)[:, None] * stride_z_b
            logit = _logits_of_many(z_ptrs, w_ptrs, R, BLOCK_N, BLOCK_B, BLOCK_R, STAGES)
            logit = logit * scale[:, None] + bias[:, None]
            kept = tl.maximum(kept, tl.max(tl.where(logit > threshold, live[None, :], 0), axis=1))
    tl.store(mask_ptr + offs_n, kept.to(tl.uint8), mask=mask_n)
    kept = tl.where(mask_n, kept, 0)
    place = tl.cumsum(kept, axis=0) * kept  # from 1 on, 0 if not kept
    count = tl.sum(kept, axis=0)
    if ALONE:
        tl.store(idx_ptr + place - 1, offs_n, mask=place != 0)
        _store_count(count_ptr, total_ptr, count, total)
    else:
        tl.store(places_ptr + offs_n, place.to(tl.uint8))
        tl.store(counts_ptr + tl.program_id(0), count)
        if is_last(tickets_ptr, tl.num_programs(0)):
            blocks = tl.num_programs(0)
            _list_kept(counts_ptr, places_ptr, idx_ptr, count_ptr, total_ptr, total, blocks, BLOCK_N, LIST_BLOCKS)


def _check(z, w2, b2, live, idx_out, count_out, mask_out, kept_total, tickets, scale) -> None:
    if z.dim() != 2 or w2.dim() != 2 or z.shape[1] != w2.shape[1] or 0 in (*z.shape, *w2.shape):
        raise ValueError(f"expected z [B, r] and w2 [N, r], none of them 0, got {tuple(z.shape)} and {tuple(w2.shape)}")
    B, N = z.shape[0], w2.shape[0]
    if b2 is not None and b2.shape != (N,):
        raise ValueError(f"b2 must be [{N}], one value a unit, got {tuple(b2.shape)}")
    if scale is not None and (scale.shape != (N,) or scale.dtype != torch.float32 or w2.dtype != torch.int8):
        raise ValueError(
            f"a scale must be [{N}] fp32, for w2 in int8; got {tuple(scale.shape)} {scale.dtype} for {w2.dtype}"
        )
    dtypes = [x.dtype for x in (z, w2, b2) if x is not None and (x is not w2 or scale is None)]
    if len(set(dtypes)) != 1 or z.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"z, w2 and b2 must share one dtype, float32, float16 or bfloat16, got {dtypes}")
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
    if live is not None and (live.shape != (B,) or live.dtype != torch.bool):
        raise ValueError(f"live must be [{B}] bool, one entry a row of z, got {tuple(live.shape)} {live.dtype}")
    if kept_total is not None and (kept_total.shape != (1,) or kept_total.dtype != torch.int64):
        raise ValueError(f"kept_total must be [1] int64, got {tuple(kept_total.shape)} {kept_total.dtype}")
    if tickets is not None and (tickets.dtype != torch.int32 or tickets.numel() < 1):
        raise ValueError(f"tickets must be one int32 zero or more, got {tickets.numel()} of {tickets.dtype}")
    if z.stride(1) != 1 and z.shape[1] > 1:
        raise ValueError(f"z must have unit stride in r, got strides {z.stride()}")
    whole = [x for x in (w2, b2, live, idx_out, mask_out, scale) if x is not None]
    if not all(x.is_contiguous() for x in whole):
        raise ValueError("w2, b2, scale, live, idx_out and mask_out must be contiguous; allocate them once, whole")
    if w2.data_ptr() % 16:
        raise ValueError("w2 must begin on a 16-byte boundary; clone() a slice of a larger tensor")


def predict_select(
    z: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    threshold: float,
    live: torch.Tensor | None,
    idx_out: torch.Tensor,
    count_out: torch.Tensor,
    mask_out: torch.Tensor,
    kept_total: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Write the units that a live row keeps into `idx_out`, `count_out` and `mask_out`; see the module docstring.

    A unit is kept if a live row's logit is strictly above `threshold`; with no live row the count is 0. Nothing is
    read back to the host, so the call can be captured in a CUDA graph (`threshold` is then part of the graph).

    Raises:
        ValueError: wrong shapes, tensors that are not contiguous, or w2 off a 16-byte boundary.
        TypeError: wrong or mixed dtypes.
    """
    _check(z, w2, b2, live, idx_out, count_out, mask_out, kept_total, tickets, scale)
    (B, R), N = z.shape, w2.shape[0]
    # The dot takes a multiple of 16 columns.
    block_r = max(16, min(_BLOCK_R if B == 1 else _DOT_BLOCK_R, triton.next_power_of_2(R)))
    blocks = triton.cdiv(N, _BLOCK_N)
    counts = torch.empty(blocks, device=z.device, dtype=torch.int32)
    places = torch.empty(blocks * _BLOCK_N, device=z.device, dtype=torch.uint8)
    if tickets is None:
        tickets = torch.zeros(1, device=z.device, dtype=torch.int32)
    _predict_select_kernel[(blocks,)](
        z, w2, scale, b2, None if live is None else live.view(torch.uint8),
        idx_out, count_out, mask_out.view(torch.uint8), kept_total, counts, places, tickets,
        float(threshold), B, N, z.stride(0),
        R=R,
        BLOCK_N=_BLOCK_N,
        BLOCK_B=1 if B == 1 else _DOT_ROWS,
        BLOCK_R=block_r,
        STAGES=_DOT_STAGES,
        LIST_BLOCKS=min(_LIST_BLOCKS, triton.next_power_of_2(blocks)),
        ALONE=blocks == 1,
        num_warps=_WARPS,
        **launch_options(),
    )  # fmt: skip
