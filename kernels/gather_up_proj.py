"""Gathered up-projection: y = x @ w[rows].T + b[rows], optionally with ReLU, for the rows of the kept units.

Deja Vu (Liu et al. 2023, arXiv:2310.17157) keeps K of the neurons or heads of a block per decode step. Reading only
their rows cuts the weight traffic, which is what bounds decoding, by the density. A unit is `group` consecutive rows:
1 for a neuron of fc1.

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

from dejavu_ds.kernels.configs import Config, config_for, tiles_ahead
from dejavu_ds.kernels.few_tokens import can_gather, gathered_linear, linear
from dejavu_ds.kernels.packed_weight import rows_of
from dejavu_ds.kernels.tiles import await_inputs, first_tiles, launch_options, rows_times_rows

# Rows that the twin copies together on their way to a product: few enough to stay in a core's cache.
_COPIED_ROWS = 256


def is_every_unit(idx: torch.Tensor, group: int, rows: int) -> bool:
    """Whether idx [K] lists every unit of so many rows in order, as in a layer that is kept dense."""
    return idx.numel() * group == rows and bool((idx[1:] > idx[:-1]).all())


def gather_up_proj_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    relu: bool = False,
    ahead: bool = False,
) -> torch.Tensor:
    """Plain torch twin of `gather_up_proj`: same arguments, same result, rounded where torch rounds.

    It is the way on a CPU, so it moves little more memory than it must: of one token rows are used where they lie; of
    more, larger units are, and smaller ones are copied in blocks.
    """
    K = int(count)
    idx, y = idx[:K], torch.empty(x.shape[0], idx.numel() * group, device=x.device, dtype=x.dtype)
    kept = y[:, : K * group]
    if is_every_unit(idx, group, w.shape[0]):
        kept.copy_(linear(x, w, b))
    elif can_gather(x, w):
        rows = rows_of(idx, group)
        kept.copy_(gathered_linear(x, w, rows))
        if b is not None:
            kept += b.index_select(0, rows)
    else:
        units, biases = w.unflatten(0, (-1, group)), None if b is None else b.unflatten(0, (-1, group))
        step = max(1, _COPIED_ROWS // group)
        block = torch.empty(min(step, K) * group, w.shape[1], device=w.device, dtype=w.dtype)
        for start in range(0, K, step):
            part = idx[start : start + step]
            if step == 1:
                rows = units[int(part)]
            else:
                rows = block[: part.numel() * group]
                torch.index_select(units, 0, part, out=rows.view(-1, group, w.shape[1]))
            bias = None if b is None else biases.index_select(0, part).flatten()
            columns = kept[:, start * group : (start + part.numel()) * group]
            columns.copy_(linear(x, rows, bias))
    if relu:
        kept.relu_()
    return y


@triton.jit
def _block_of_rows(
    x_ptr, w_ptr, b_ptr, y_ptr, token, mask_b, row, offs_n, mask_n, first, stride_y_b,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute and store places offs_n, rows `row` of w, of which `first` is there already."""
    y = rows_times_rows(x_ptr, token, mask_b, w_ptr, row, mask_n, first, D, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES)
    if HAS_BIAS:
        y += tl.load(b_ptr + row, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if RELU:
        y = tl.where(y < 0.0, 0.0, y)  # not maximum(): a NaN must stay one
    y_ptrs = y_ptr + token[:, None] * stride_y_b + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_b[:, None] & mask_n[None, :])


# B and the capacity are not specialised: another batch must not compile again.
@triton.jit(do_not_specialize=["B", "stride_y_b"])
def _gather_up_proj_kernel(
    x_ptr, w_ptr, b_ptr, idx_ptr, count_ptr, y_ptr,
    B, stride_y_b,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """AHEAD  tiles of a program's first rows that are loaded before it waits for what was launched before"""
    if AHEAD == 0:
        await_inputs(EARLY)
    rows = tl.load(count_ptr) * GROUP
    # The units of a block are asked for a block ahead, the first ones' at the same time as the count.
    cap = stride_y_b
    step = tl.num_programs(0) * BLOCK_N
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    next_unit = tl.load(idx_ptr + offs_n // GROUP, mask=offs_n < cap, other=0)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    token = offs_b.to(tl.int64)
    begin = tl.program_id(0)
    if AHEAD > 0:
        mask_n = offs_n < rows
        row = next_unit.to(tl.int64) * GROUP + offs_n % GROUP
        ahead = offs_n + step
        next_unit = tl.load(idx_ptr + ahead // GROUP, mask=ahead < cap, other=0)
        first = first_tiles(w_ptr, row, mask_n, AHEAD, D, BLOCK_D)
        await_inputs(EARLY)
        _block_of_rows(
            x_ptr, w_ptr, b_ptr, y_ptr, token, mask_b, row, offs_n, mask_n, first, stride_y_b,
            D, HAS_BIAS, RELU, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES,
        )  # fmt: skip
        begin += tl.num_programs(0)

    for block in range(begin, tl.cdiv(rows, BLOCK_N), tl.num_programs(0)):
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < rows
        row = next_unit.to(tl.int64) * GROUP + offs_n % GROUP
        ahead = offs_n + step
        next_unit = tl.load(idx_ptr + ahead // GROUP, mask=ahead < cap, other=0)
        _block_of_rows(
            x_ptr, w_ptr, b_ptr, y_ptr, token, mask_b, row, offs_n, mask_n, (), stride_y_b,
            D, HAS_BIAS, RELU, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES,
        )  # fmt: skip


def check_gather(idx: torch.Tensor, count: torch.Tensor, w: torch.Tensor, group: int) -> None:
    """ValueError or TypeError unless idx [cap] and count [1] are int32 and `group` divides the rows of `w`."""
    if group < 1 or w.shape[0] % group:
        raise ValueError(f"group must divide the {w.shape[0]} rows of w, got {group}")
    if idx.dim() != 1 or count.shape != (1,):
        raise ValueError(f"expected idx [cap] and count [1], got {tuple(idx.shape)} and {tuple(count.shape)}")
    if idx.dtype != torch.int32 or count.dtype != torch.int32:
        raise TypeError(f"idx and count must be int32, got {idx.dtype} and {count.dtype}")


def gather_up_proj(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    group: int = 1,
    relu: bool = False,
    config: Config | None = None,
    ahead: bool = False,
) -> torch.Tensor:
    """Return x @ w[rows].T + b[rows] for the rows of the kept units; shapes and limits are in the module docstring.

    Each kept row of `w` is read once for every 16 tokens. `config` overrides the tuned block sizes. `ahead`: the launch
    before writes x, but neither idx nor count, so rows may be loaded while it still runs.

    Raises:
        ValueError: wrong shapes, a `group` that does not divide the rows, or tensors that are not contiguous.
        TypeError: x, w and b of different dtypes, or idx or count not int32.
    """
    if x.dim() != 2 or w.dim() != 2 or w.shape[1] != x.shape[1]:
        raise ValueError(f"expected x [B, D] and w [rows, D] with one D, got {tuple(x.shape)} and {tuple(w.shape)}")
    check_gather(idx, count, w, group)
    if b is not None and b.shape != (w.shape[0],):
        raise ValueError(f"b must be [{w.shape[0]}], one value a row of w, got {tuple(b.shape)}")
    if x.dtype != w.dtype or (b is not None and b.dtype != x.dtype):
        raise TypeError(f"x, w and b must share one dtype, got {x.dtype}, {w.dtype}, {None if b is None else b.dtype}")
    if not all(t.is_contiguous() for t in (x, w, idx) + (() if b is None else (b,))):
        raise ValueError("x, w, b and idx must be contiguous; call .contiguous() once at load time, not per step")

    B, D = x.shape
    rows_cap = idx.numel() * group
    y = torch.empty(B, rows_cap, device=x.device, dtype=x.dtype)
    c = config or config_for("gather_up_proj", B, D, x.dtype)
    grid = (min(triton.cdiv(rows_cap, c.block_n), c.programs), triton.cdiv(B, c.block_b))
    _gather_up_proj_kernel[grid](
        x, w, b, idx, count, y,
        B, rows_cap,
        D=D,
        GROUP=group,
        HAS_BIAS=b is not None,
        RELU=relu,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        DOT=c.dot,
        STAGES=c.stages,
        AHEAD=tiles_ahead(c, D, x.dtype) if ahead else 0,
        num_warps=c.warps,
        **launch_options(),
    )  # fmt: skip
    return y
