"""Gathered down-projection: y = sum over the kept rows n of h[:, n] * w[n].

The second half of a sparse layer (Deja Vu, Liu et al. 2023, arXiv:2310.17157): fc2 of the kept neurons, or out_proj of
the kept heads. The weight is stored transposed, row n being what unit n adds to the output, so that what is kept is
contiguous. A unit is `group` consecutive rows: 1 for a neuron, head_dim for a head.

ReLU leaves exact zeros among the kept neurons. With `skip_zeros` a row whose h is zero for all of up to 4 tokens is not
loaded, so a NaN or infinity in it does not matter, whereas 0 * inf would be NaN in a dense layer. From 5 tokens on
tensor cores multiply, and to wait for h before a row is loaded would cost more than the few rows that nobody needs.

A program owns a strip of columns of the output and walks the kept rows, or one share of S of them: what it reads of a
row is short, 32 to 256 bytes, but neighbouring programs read the rest of the row at about the same time. The results of
the shares are left to be added by what comes next, which reads the output anyway (`add_norm`): to merge them here would
take longer than to read the weights. Nothing is added atomically, so the same bits come out in every run. S follows
from the shapes, the number of rows is read from device memory (a CUDA graph can be replayed with another count).

Shapes (B tokens, D hidden size, cap = idx.numel(), K = count kept units):
    h        [B, cap * group] contiguous; columns from K * group on are never read
    w        [N * group, D]   contiguous
    idx      [cap]            int32, 0 <= idx[:K] < N, any order; values are not checked (it would sync)
    count    [1]              int32, 0 <= K <= cap
    y        [S, B, D]        fp32, whose sum over S is the result; zeros if K = 0
Column s * group + j of h belongs to row idx[s] * group + j of w.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config, config_for, rows_at_once
from dejavu_ds.kernels.few_tokens import times
from dejavu_ds.kernels.gather_up_proj import check_gather, is_every_unit
from dejavu_ds.kernels.packed_weight import rows_of
from dejavu_ds.kernels.tiles import await_inputs, dot, launch_options
from dejavu_ds.kernels.wanted_rows import (
    ask,
    ask_places,
    cut,
    declare,
    first_places,
    list_address,
    list_wanted,
    row_and_mask,
    split_all,
    store_sum,
    walk_options,
)


def gather_down_proj_ref(
    h: torch.Tensor,
    w: torch.Tensor,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch twin of `gather_down_proj`: same arguments, same result with S = 1, rounded where torch rounds.

    With `skip_zeros` its tile is the whole batch.
    """
    K = int(count)
    h, idx = h[:, : K * group], idx[:K]
    if skip_zeros:
        columns = (h != 0).any(dim=0).nonzero().squeeze(1)
        h, rows = h.index_select(1, columns), idx[columns // group] * group + columns % group
        y = _rows_times(h, w, rows)
    elif is_every_unit(idx, group, w.shape[0]):
        y = times(h, w)
    else:
        y = _rows_times(h, w, rows_of(idx, group))
    return in_parts(y, out)


def in_parts(y: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """y [B, D] as the sum of `out` [S, B, D], or in fp32 as the only part."""
    if out is None:
        return y.float()[None]
    out[0], out[1:] = y, 0
    return out


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
# So many parts add_norm reads without taking notably longer; a share of fewer rows is not worth its part.
_MAX_SHARES = 8
_LEAST_ROWS = 64


@triton.jit
def _weights(
    w_ptr, units, h, place, rows, columns,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """`columns` [threads, LANE] of the rows at these places, as far as some token wants them: a tuple by steps."""
    w = ()
    for u in tl.static_range(STEPS):
        row, mask = row_and_mask(units, h, place, rows, u, GROUP, SKIP_ZEROS, BLOCK_B, ROWS, LISTED)
        mask = mask[:, None]
        if D % BLOCK_D != 0:
            mask = mask & (columns < D)
        # Weights pass through the L1 cache.
        w_ptrs = w_ptr + columns + (row * D)[:, None]
        w = w + (tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return w


@triton.jit
def _add(acc, w, h, BLOCK_B: tl.constexpr, STEPS: tl.constexpr):
    """acc, [threads, LANE] for each token, and h * w of all steps."""
    for u in tl.static_range(STEPS):
        values, new = w[u].to(tl.float32), ()
        for b in tl.static_range(BLOCK_B):
            new = new + (acc[b] + h[u * BLOCK_B + b].to(tl.float32)[:, None] * values,)
        acc = new
    return acc


@triton.jit
def _walk(
    acc, h_ptr, w_ptr, idx_ptr, listed, units, h, next_units, next_h, first, step, rows, thread, columns, first_b, B,
    stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """acc and the rows at places first .. rows - 1, every `step` a block.

    `ask` has been of the first block, and of the next one but where it takes them from the list, which is quick.
    """
    place = first + thread // (thread.shape[0] // ROWS)
    w = _weights(w_ptr, units, h, place, rows, columns, D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D, ROWS, STEPS, LISTED)
    for _ in range(first, rows, step):
        place += step
        if LISTED:
            next_units, next_h = ask(
                h_ptr, idx_ptr, listed, place, rows, first_b, B, stride_h_b, 1, 1, ROWS, STEPS, LISTED
            )
        next_w = _weights(
            w_ptr, next_units, next_h, place, rows, columns,
            D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D, ROWS, STEPS, LISTED,
        )  # fmt: skip
        if not LISTED:
            after_units, after_h = ask(
                h_ptr, idx_ptr, None, place + step, rows, first_b, B, stride_h_b, GROUP, BLOCK_B, ROWS, STEPS, False
            )
        acc = _add(acc, w, h, BLOCK_B, STEPS)
        w, h = next_w, next_h
        if not LISTED:
            next_units, next_h = after_units, after_h
    return acc


@triton.jit
def _sum_of_rows(
    h_ptr, w_ptr, idx_ptr, count_ptr, thread, columns, first_b, B, stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """By multiply-adds, of this share's rows: for each token [threads, LANE] in fp32.

    EACH  places a thread that are listed at a time; 0: there is no list, and blocks of BLOCK_N places are taken in turn
    Where the first places of a share lie does not hang on the count, so that they are asked for at the same time as it.
    """
    STEPS: tl.constexpr = BLOCK_N // ROWS
    LANES: tl.constexpr = thread.shape[0] // ROWS
    share, shares = tl.program_id(1), tl.num_programs(1)
    acc = ()
    for _ in tl.static_range(BLOCK_B):
        acc = acc + (tl.zeros_like(columns).to(tl.float32),)
    if EACH > 0:
        h_ptr += first_b * stride_h_b
        first, start, step = first_places(share, shares, thread, EACH)
        units, h = ask_places(h_ptr, idx_ptr, start, stride_h_b, GROUP, EACH)
        rows = tl.load(count_ptr) * GROUP
        place = thread // LANES
        for here in range(first, rows, step):
            n = list_wanted(units, h, start, rows, thread, EACH)
            # Not pure: so it stays behind the barrier, and with it the reads of the list, which are, lest Triton keeps
            # a copy of each for every layout, but depend on it.
            listed = list_address(thread)
            start += step
            if here + step < rows:
                units, h = ask_places(h_ptr, idx_ptr, start, rows, GROUP, EACH)
            now, now_h = ask(h_ptr, idx_ptr, listed, place, n, first_b, B, stride_h_b, 1, 1, ROWS, STEPS, True)
            acc = _walk(
                acc, h_ptr, w_ptr, idx_ptr, listed, now, now_h, now, now_h, 0, BLOCK_N, n, thread, columns,
                first_b, B, stride_h_b, D, 1, False, 1, BLOCK_D, ROWS, STEPS, True,
            )  # fmt: skip
    else:
        first, step = share * BLOCK_N, shares * BLOCK_N
        place = first + thread // LANES
        units, h = ask(
            h_ptr, idx_ptr, None, place, stride_h_b, first_b, B, stride_h_b, GROUP, BLOCK_B, ROWS, STEPS, False
        )
        then, then_h = ask(
            h_ptr, idx_ptr, None, place + step, stride_h_b, first_b, B, stride_h_b, GROUP, BLOCK_B, ROWS, STEPS, False
        )
        rows = tl.load(count_ptr) * GROUP
        h = cut(h, place, rows, BLOCK_B, ROWS, STEPS)
        then_h = cut(then_h, place + step, rows, BLOCK_B, ROWS, STEPS)
        acc = _walk(
            acc, h_ptr, w_ptr, idx_ptr, None, units, h, then, then_h, first, step, rows, thread, columns,
            first_b, B, stride_h_b, D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D, ROWS, STEPS, False,
        )  # fmt: skip
    return acc


@triton.jit
def _dot_of_rows(
    h_ptr, w_ptr, idx_ptr, first, rows, first_b, B, offs_d, stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_B, BLOCK_D] fp32 by tensor cores, of the places first .. rows - 1."""
    y = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
    offs_b = first_b + tl.arange(0, BLOCK_B)
    h_ptrs = h_ptr + offs_b[:, None] * stride_h_b
    for n in tl.range(first, rows, BLOCK_N, num_stages=STAGES):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < rows
        unit = tl.load(idx_ptr + offs_n // GROUP, mask=mask_n, other=0).to(tl.int64)
        row = unit * GROUP + offs_n % GROUP
        h = tl.load(h_ptrs + offs_n[None, :], mask=(offs_b < B)[:, None] & mask_n[None, :], other=0.0)
        mask_w = mask_n[:, None]
        if D % BLOCK_D != 0:
            mask_w = mask_w & (offs_d < D)[None, :]
        w = tl.load(w_ptr + row[:, None] * D + offs_d[None, :], mask=mask_w, other=0.0)
        y = dot(h, w, y)
    return y


# B and the capacity are not specialised: another batch must not compile again.
@triton.jit(do_not_specialize=["B", "stride_h_b"])
def _gather_down_proj_kernel(
    h_ptr, w_ptr, idx_ptr, count_ptr, y_ptr,
    B, stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANE: tl.constexpr,
    EACH: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """By multiply-adds; a thread has LANE neighbouring columns of the strip, 16 bytes."""
    LANES: tl.constexpr = BLOCK_D // LANE
    declare(EACH > 0 or SHARED)
    await_inputs(EARLY)
    first_b = tl.program_id(2).to(tl.int64) * BLOCK_B
    thread = tl.arange(0, ROWS * LANES)
    first_d = tl.program_id(0) * BLOCK_D
    columns = (first_d + thread % LANES * LANE)[:, None] + tl.arange(0, LANE)[None, :]
    acc = _sum_of_rows(
        h_ptr, w_ptr, idx_ptr, count_ptr, thread, columns, first_b, B, stride_h_b,
        D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_N, ROWS, BLOCK_D, EACH,
    )  # fmt: skip
    for b in tl.static_range(BLOCK_B):
        place = tl.program_id(1).to(tl.int64) * B + first_b + b
        end = tl.where(first_b + b < B, D - first_d, 0)
        store_sum(split_all(acc[b], LANE), y_ptr + place * D + first_d, end, thread, ROWS, LANES, LANE, SHARED)


@triton.jit(do_not_specialize=["B", "stride_h_b"])
def _gather_down_proj_dot_kernel(
    h_ptr, w_ptr, idx_ptr, count_ptr, y_ptr,
    B, stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """By tensor cores."""
    await_inputs(EARLY)
    rows = tl.load(count_ptr) * GROUP
    share = tl.cdiv(rows, tl.num_programs(1))
    first = tl.program_id(1) * share
    rows = tl.minimum(first + share, rows)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    first_b = tl.program_id(2).to(tl.int64) * BLOCK_B
    y = _dot_of_rows(
        h_ptr, w_ptr, idx_ptr, first, rows, first_b, B, offs_d, stride_h_b,
        D, GROUP, BLOCK_B, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    offs_b = first_b + tl.arange(0, BLOCK_B)
    mask = (offs_b < B)[:, None] & (offs_d < D)[None, :]
    place = tl.program_id(1).to(tl.int64) * B + offs_b
    tl.store(y_ptr + place[:, None] * D + offs_d[None, :], y, mask=mask)


def check_down(h, w, idx, count, group, out) -> None:
    """ValueError or TypeError for what `gather_down_proj` refuses; w may be packed."""
    if h.dim() != 2 or len(w.shape) != 2:
        raise ValueError(f"expected h [B, cap * group] and w [rows, D], got {tuple(h.shape)} and {tuple(w.shape)}")
    check_gather(idx, count, w, group)
    if h.shape[1] != idx.numel() * group:
        raise ValueError(
            f"h must have cap * group = {idx.numel()} * {group} = {idx.numel() * group} columns, got {h.shape[1]}"
        )
    if h.dtype != w.dtype:
        raise TypeError(f"h and w must share one dtype, got {h.dtype} and {w.dtype}")
    result = (h.shape[0], w.shape[1])
    if out is not None and (out.dim() != 3 or not len(out) or out.shape[1:] != result or not out.is_contiguous()):
        raise ValueError(f"out must be [S, {result[0]}, {result[1]}] and contiguous, got {tuple(out.shape)}")
    if out is not None and out.dtype != torch.float32:
        raise TypeError(f"out must be float32, got {out.dtype}")
    if not all(t.is_contiguous() for t in (h, w, idx) if torch.is_tensor(t)):
        raise ValueError("h, w and idx must be contiguous; call .contiguous() once at load time, not per step")


def shares_of(c: Config, h: torch.Tensor, D: int) -> int:
    """Parts S that the rows are shared into."""
    return max(1, min(_MAX_SHARES, c.programs // strips_of(c, h.shape[0], D), h.shape[1] // _LEAST_ROWS))


def strips_of(c: Config, B: int, D: int) -> int:
    """Programs of a share."""
    return triton.cdiv(D, c.block_d) * triton.cdiv(B, c.block_b)


def gather_down_proj(
    h: torch.Tensor,
    w: torch.Tensor,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    skip_zeros: bool = False,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Return the sum over the kept rows of h[:, n] * w[n], in S parts; shapes and limits are in the module docstring.

    Each kept row of `w` is read once for every 16 tokens. `out` [S, B, D] fp32, contiguous, takes the result and says
    what S is. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, a `group` that does not divide the rows, or tensors that are not contiguous.
        TypeError: h and w of different dtypes, idx or count not int32, or out not fp32.
    """
    check_down(h, w, idx, count, group, out)
    B, D = h.shape[0], w.shape[1]
    c = config or config_for("gather_down_proj" if group == 1 else "out_proj", B, D, h.dtype, out is not None)
    strips, tiles = triton.cdiv(D, c.block_d), triton.cdiv(B, c.block_b)
    y = torch.empty(shares_of(c, h, D), B, D, device=h.device, dtype=torch.float32) if out is None else out
    if c.dot:
        kernel, own = _gather_down_proj_dot_kernel, {"STAGES": c.stages}
    else:
        lane = min(c.block_d, 16 // h.dtype.itemsize)
        rows, lanes = min(c.block_n, rows_at_once(c, h.dtype)), c.block_d // lane
        kernel, own = _gather_down_proj_kernel, {"LANE": lane, **walk_options(c, rows, lanes, skip_zeros)}
    kernel[(strips, len(y), tiles)](
        h, w, idx, count, y,
        B, h.shape[1],
        D=D,
        GROUP=group,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        num_warps=c.warps,
        **own,
        **launch_options(),
    )  # fmt: skip
    return y
