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
from dejavu_ds.kernels.gather_up_proj import check_gather, is_every_unit
from dejavu_ds.kernels.tiles import await_inputs, dot, launch_options


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
        y = h @ w
    else:
        rows = (idx[:, None] * group + torch.arange(group, device=idx.device, dtype=idx.dtype)).flatten()
        y = _rows_times(h, w, rows)
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
def _of_token(h_ptrs, b, first_b, B, stride_h_b, offs_n, end):
    """Elements offs_n of token first_b + b; zeros from `end` on, and for a token that is not there."""
    end_b = tl.where(first_b + b < B, end, 0)
    return tl.load(h_ptrs + b * stride_h_b + offs_n, mask=offs_n < end_b, other=0.0)


@triton.jit
def _weights(
    w_ptr, unit, h, h_ptrs, offs_n, rows, first_b, B, offs_d, stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The strip of the rows at places offs_n, as far as some token wants them; h is that of the first token."""
    row = unit.to(tl.int64) * GROUP + offs_n % GROUP
    mask = offs_n < rows
    if SKIP_ZEROS:
        wanted = h != 0.0
        for b in tl.static_range(1, BLOCK_B):
            wanted |= _of_token(h_ptrs, b, first_b, B, stride_h_b, offs_n, rows) != 0.0
        mask = mask & wanted
    if D % BLOCK_D != 0:
        mask = mask & (offs_d < D)[None, :]
    # Weights pass through the L1 cache.
    return tl.load(w_ptr + row * D + offs_d[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _sum_of_rows(
    h_ptr, w_ptr, idx_ptr, first, rows, first_b, B, offs_d, stride_h_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_ZEROS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_B, BLOCK_D] fp32 by multiply-adds, of the places first .. rows - 1.

    A thread holds 16 bytes of every ROWS-th row, so that the sum over these rows stays within it. While one tile is
    added up the next one is on its way, and what says where the one after that lies.
    """
    acc = tl.zeros((BLOCK_B, ROWS, BLOCK_D), dtype=tl.float32)
    h_ptrs = h_ptr + first_b * stride_h_b
    offs_n = first + tl.arange(0, BLOCK_N)[:, None]
    unit = tl.load(idx_ptr + offs_n // GROUP, mask=offs_n < rows, other=0)
    h = _of_token(h_ptrs, 0, first_b, B, stride_h_b, offs_n, rows)
    next_unit = tl.load(idx_ptr + (offs_n + BLOCK_N) // GROUP, mask=offs_n + BLOCK_N < rows, other=0)
    next_h = _of_token(h_ptrs, 0, first_b, B, stride_h_b, offs_n + BLOCK_N, rows)
    w = _weights(
        w_ptr, unit, h, h_ptrs, offs_n, rows, first_b, B, offs_d, stride_h_b, D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D
    )
    for n in range(first, rows, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)[:, None]
        ahead = offs_n + BLOCK_N
        next_w = _weights(
            w_ptr, next_unit, next_h, h_ptrs, ahead, rows, first_b, B, offs_d, stride_h_b,
            D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_D,
        )  # fmt: skip
        ahead += BLOCK_N
        next_unit = tl.load(idx_ptr + ahead // GROUP, mask=ahead < rows, other=0)
        for b in tl.static_range(BLOCK_B):
            if b > 0:
                h = _of_token(h_ptrs, b, first_b, B, stride_h_b, offs_n, rows)
            products = tl.reshape(h.to(tl.float32) * w.to(tl.float32), (BLOCK_N // ROWS, ROWS, BLOCK_D))
            y = tl.sum(products, axis=0)[None, :, :]
            if BLOCK_B == 1:
                acc += y
            else:
                # An element of acc knows its b when the kernel is compiled, so this is one addition.
                acc = tl.where((tl.arange(0, BLOCK_B) == b)[:, None, None], acc + y, acc)
        w, h = next_w, next_h
        next_h = _of_token(h_ptrs, 0, first_b, B, stride_h_b, ahead, rows)
    return tl.sum(acc, axis=1)


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
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    rows = tl.load(count_ptr) * GROUP
    share = tl.cdiv(rows, tl.num_programs(1))
    first = tl.program_id(1) * share
    rows = tl.minimum(first + share, rows)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    first_b = tl.program_id(2).to(tl.int64) * BLOCK_B
    if DOT:
        y = _dot_of_rows(
            h_ptr, w_ptr, idx_ptr, first, rows, first_b, B, offs_d, stride_h_b,
            D, GROUP, BLOCK_B, BLOCK_N, BLOCK_D, STAGES,
        )  # fmt: skip
    else:
        y = _sum_of_rows(
            h_ptr, w_ptr, idx_ptr, first, rows, first_b, B, offs_d, stride_h_b,
            D, GROUP, SKIP_ZEROS, BLOCK_B, BLOCK_N, ROWS, BLOCK_D,
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
    _gather_down_proj_kernel[(strips, len(y), tiles)](
        h, w, idx, count, y,
        B, h.shape[1],
        D=D,
        GROUP=group,
        SKIP_ZEROS=skip_zeros,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        ROWS=min(c.block_n, rows_at_once(c, h.dtype)),
        BLOCK_D=c.block_d,
        DOT=c.dot,
        STAGES=c.stages,
        num_warps=c.warps,
        **launch_options(),
    )  # fmt: skip
    return y
