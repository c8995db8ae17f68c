"""Gathered down-projection: y = sum over the kept rows n of h[:, n] * w[n].

The second half of a sparse layer (Deja Vu, Liu et al. 2023, arXiv:2310.17157): fc2 of the kept neurons, or out_proj of
the kept heads. The weight is stored transposed, row n being what unit n adds to the output, so that what is kept is
contiguous. A unit is `group` consecutive rows: 1 for a neuron, head_dim for a head.

ReLU leaves exact zeros among the kept neurons. With `skip_zeros` a row whose h is zero for all of up to 4 tokens is not
loaded, so a NaN or infinity in it does not matter, whereas 0 * inf would be NaN in a dense layer. From 5 tokens on
tensor cores multiply, and to wait for h before a row is loaded would cost more than the few rows that nobody needs.

The kept rows are split over the second axis of the grid. Of the programs of one tile of the output the last to finish
adds the partial sums of all, always in the same order: no float atomics, no second launch, the same bits in every run.
The number of splits follows from the shapes; how many rows a split takes follows from the count, which is read from
device memory (a CUDA graph can be replayed with another count).

Shapes (B tokens, D hidden size, cap = idx.numel(), K = count kept units):
    h        [B, cap * group] contiguous; columns from K * group on are never read
    w        [N * group, D]   contiguous
    idx      [cap]            int32, 0 <= idx[:K] < N, any order; values are not checked (it would sync)
    count    [1]              int32, 0 <= K <= cap
    tickets  [>= tiles]       int32 zeros that no launch running at the same time uses; zeros again afterwards
    y        [B, D]           dtype of h, or `out` and its dtype; accumulated in fp32; zeros if K = 0
Column s * group + j of h belongs to row idx[s] * group + j of w.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config, config_for
from dejavu_ds.kernels.gather_up_proj import check_gather, is_every_unit
from dejavu_ds.kernels.tiles import await_inputs, dot, is_last, launch_options


def gather_down_proj_ref(
    h: torch.Tensor,
    w: torch.Tensor,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
    out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch twin of `gather_down_proj`: same arguments, same result, rounded where torch rounds.

    With `skip_zeros` its tile is the whole batch.
    """
    K = int(count)
    h, idx = h[:, : K * group], idx[:K]
    if skip_zeros:
        columns = (h != 0).any(dim=0).nonzero().squeeze(1)
        h, rows = h.index_select(1, columns), idx[columns // group] * group + columns % group
        y = _rows_times(h, w, rows)
    elif is_every_unit(idx, group, w.shape[0]):
        y = h @ w
    else:
        rows = (idx[:, None] * group + torch.arange(group, device=idx.device, dtype=idx.dtype)).flatten()
        y = _rows_times(h, w, rows)
    return y if out is None else out.copy_(y)


def _rows_times(h: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return _weighted_rows(h, w, rows) if h.dtype == torch.float32 else h @ w.index_select(0, rows)


def _weighted_rows(h: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """h @ w[rows] without a copy of the rows: they are added up, scaled, as the vectors of an embedding are.

    A bag is one thread's work, so the rows of a token are split into several.
    """
    B, n = h.shape
    if n == 0:
        return h.new_zeros(B, w.shape[1])
    bags = min(_BAGS, n)
    starts = (
        torch.arange(bags, device=rows.device) * n // bags + n * torch.arange(B, device=rows.device)[:, None]
    ).int()
    parts = torch.nn.functional.embedding_bag(
        rows.int().repeat(B), w, starts.flatten(), mode="sum", per_sample_weights=h.flatten()
    )
    return parts.view(B, bags, -1).sum(1)


# Of the twin's sum: enough for the threads of a CPU.
_BAGS = 16
# No split with fewer rows than its partial sum is worth.
_MIN_ROWS_PER_SPLIT = 64
_MAX_SPLITS = 64
# Of the fp32 partial sums that are added at once: 64 registers a thread of 4 warps.
_SUM_ELEMENTS = 8192
TICKETS = 4096
"""Enough for any y of up to 16 tokens and 16,384 columns."""


@triton.jit
def _rows_of_tile(idx_ptr, offs_n, end, GROUP: tl.constexpr):
    """Rows of w behind the places offs_n of the gathered ones, int64, and which of the places there are."""
    mask_n = offs_n < end
    unit = tl.load(idx_ptr + offs_n // GROUP, mask=mask_n, other=0).to(tl.int64)
    return unit * GROUP + offs_n % GROUP, mask_n


@triton.jit
def _partial_product(
    h_ptr, w_ptr, idx_ptr, first, end, token, mask_b, offs_d, stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_B, BLOCK_D] fp32: h times w over the gathered rows first..end - 1."""
    if DOT:
        y = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
        for n in tl.range(first, end, BLOCK_N, num_stages=STAGES):
            offs_n = n + tl.arange(0, BLOCK_N)
            row, mask_n = _rows_of_tile(idx_ptr, offs_n, end, GROUP)
            h = tl.load(
                h_ptr + token[:, None] * stride_h_b + offs_n[None, :], mask=mask_b[:, None] & mask_n[None, :], other=0.0
            )
            mask_w = mask_n[:, None]
            if D % BLOCK_D != 0:
                mask_w = mask_w & (offs_d < D)[None, :]
            w = tl.load(w_ptr + row[:, None] * D + offs_d[None, :], mask=mask_w, other=0.0)
            y = dot(h, w, y)
    else:
        # All tiles are loaded in the shape of acc, so that no operand changes its layout inside the loop.
        acc = tl.zeros((BLOCK_B, BLOCK_N, BLOCK_D), dtype=tl.float32)
        for n in tl.range(first, end, BLOCK_N, num_stages=STAGES):
            offs_n = n + tl.arange(0, BLOCK_N)
            row, mask_n = _rows_of_tile(idx_ptr, offs_n, end, GROUP)
            # [BLOCK_B, BLOCK_N, 1]
            h = tl.load(
                h_ptr + token[:, None, None] * stride_h_b + offs_n[None, :, None],
                mask=mask_b[:, None, None] & mask_n[None, :, None],
                other=0.0,
            ).to(tl.float32)
            mask_w = mask_n[None, :, None]
            if SKIP_ZEROS:
                mask_w = mask_w & (tl.max((h != 0.0).to(tl.int32), axis=0, keep_dims=True) > 0)
            if D % BLOCK_D != 0:
                mask_w = mask_w & (offs_d < D)[None, None, :]
            # [1, BLOCK_N, BLOCK_D]; weights pass through the L1 cache
            w = tl.load(
                w_ptr + row[None, :, None] * D + offs_d[None, None, :],
                mask=mask_w,
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
            acc += h * w
        y = tl.sum(acc, axis=1)
    return y


# B and the capacity are not specialised: another batch must not compile again.
@triton.jit(do_not_specialize=["B", "stride_h_b", "SPLITS"])
def _gather_down_proj_kernel(
    h_ptr, w_ptr, idx_ptr, count_ptr, part_ptr, tickets_ptr, y_ptr,
    B, stride_h_b, SPLITS,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    split = tl.program_id(1)
    rows = tl.load(count_ptr) * GROUP
    share = tl.cdiv(tl.cdiv(rows, SPLITS), BLOCK_N) * BLOCK_N
    first = split * share
    end = tl.minimum(first + share, rows)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    token = offs_b.to(tl.int64)
    part = _partial_product(
        h_ptr, w_ptr, idx_ptr, first, end, token, mask_b, offs_d, stride_h_b,
        D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES,
    )  # fmt: skip
    mask = mask_b[:, None] & (offs_d < D)[None, :]
    tl.store(part_ptr + (split.to(tl.int64) * B + token[:, None]) * D + offs_d[None, :], part, mask=mask)

    if is_last(tickets_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), SPLITS):
        y = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
        for start in range(0, SPLITS, BLOCK_S):
            offs_s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
            # [BLOCK_S, BLOCK_B, BLOCK_D]
            parts = tl.load(
                part_ptr + (offs_s[:, None, None] * B + token[None, :, None]) * D + offs_d[None, None, :],
                mask=(offs_s < SPLITS)[:, None, None] & mask[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )
            y += tl.sum(parts, axis=0)
        tl.store(y_ptr + token[:, None] * D + offs_d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def _splits(rows_cap: int, tiles: int, programs: int) -> int:
    wanted = min(triton.cdiv(programs, tiles), _MAX_SPLITS)
    return max(1, min(wanted, rows_cap // _MIN_ROWS_PER_SPLIT))


def _check(h, w, idx, count, group, tickets) -> None:
    if h.dim() != 2 or w.dim() != 2:
        raise ValueError(f"expected h [B, cap * group] and w [rows, D], got {tuple(h.shape)} and {tuple(w.shape)}")
    check_gather(idx, count, w, group)
    if h.shape[1] != idx.numel() * group:
        raise ValueError(
            f"h must have cap * group = {idx.numel()} * {group} = {idx.numel() * group} columns, got {h.shape[1]}"
        )
    if h.dtype != w.dtype:
        raise TypeError(f"h and w must share one dtype, got {h.dtype} and {w.dtype}")
    if tickets is not None and tickets.dtype != torch.int32:
        raise TypeError(f"tickets must be int32, got {tickets.dtype}")
    if not all(t.is_contiguous() for t in (h, w, idx)):
        raise ValueError("h, w and idx must be contiguous; call .contiguous() once at load time, not per step")


def gather_down_proj(
    h: torch.Tensor,
    w: torch.Tensor,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
    out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Return the sum over the kept rows of h[:, n] * w[n]; shapes and limits are in the module docstring.

    Each kept row of `w` is read once for every 16 tokens. `out` [B, D], contiguous, takes the result; in fp32 a partial
    one stays unrounded. `tickets`, of `TICKETS` elements, saves a memset a call; where those are too few, they are made
    for the call. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, a `group` that does not divide the rows, or tensors that are not contiguous.
        TypeError: h and w of different dtypes, or idx, count or tickets not int32.
    """
    _check(h, w, idx, count, group, tickets)
    if out is not None and (out.shape != (h.shape[0], w.shape[1]) or not out.is_contiguous()):
        raise ValueError(f"out must be {[h.shape[0], w.shape[1]]} and contiguous, got {tuple(out.shape)}")
    B, D = h.shape[0], w.shape[1]
    c = config or config_for("gather_down_proj" if group == 1 else "out_proj", B, D, h.dtype)
    tiles_d, tiles_b = triton.cdiv(D, c.block_d), triton.cdiv(B, c.block_b)
    if tickets is None or tickets.numel() < tiles_d * tiles_b:
        tickets = torch.zeros(tiles_d * tiles_b, dtype=torch.int32, device=h.device)
    splits = _splits(h.shape[1], tiles_d * tiles_b, c.programs)
    y = torch.empty(B, D, device=h.device, dtype=h.dtype) if out is None else out
    part = torch.empty(splits, B, D, device=h.device, dtype=torch.float32)
    _gather_down_proj_kernel[(tiles_d, splits, tiles_b)](
        h, w, idx, count, part, tickets, y,
        B, h.shape[1], splits,
        D=D,
        GROUP=group,
        SKIP_ZEROS=skip_zeros,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        BLOCK_S=max(1, min(triton.next_power_of_2(splits), _SUM_ELEMENTS // (c.block_b * c.block_d))),
        DOT=c.dot,
        STAGES=c.stages,
        num_warps=c.warps,
        **launch_options(),
    )  # fmt: skip
    return y
