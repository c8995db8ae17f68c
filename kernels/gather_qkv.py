"""Query, key and value of the kept heads for one token a sequence.

Only the rows of the heads kept by the step are read (Deja Vu, Liu et al. 2023, arXiv:2310.17157). The three parts of a
head lie together, so that a kept head is one contiguous piece of memory. What the head has missed in earlier steps is
`recover_kv`'s.

Shapes (B tokens, H heads, D hidden size, R ring length, T cache capacity, cap = idx.numel(), K = count kept heads):
    x      [B, D]               contiguous
    w      [H, 3, head_dim, D]  contiguous; query, key and value rows of each head
    b      [H, 3, head_dim]     contiguous, or None
    idx    [cap]                int32, 0 <= idx[:K] < H, distinct; values are not checked (it would sync)
    count  [1]                  int32, 0 <= K <= cap
    qkv    [B, cap, 3, head_dim]  dtype of x, accumulated in fp32; slots from K on are unspecified
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config, config_for
from dejavu_ds.kernels.gather_up_proj import check_gather, gather_up_proj_ref
from dejavu_ds.kernels.tiles import await_inputs, launch_options, rows_times_rows


def gather_qkv_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """Plain torch twin of `gather_qkv`: same arguments, same result, rounded where torch rounds."""
    head_dim = w.shape[2]
    bias = None if b is None else b.flatten()
    qkv = gather_up_proj_ref(x, w.flatten(0, 2), bias, idx, count, group=3 * head_dim)
    return qkv.view(x.shape[0], idx.numel(), 3, head_dim)


# The batch and the capacity are not specialised: another one must not compile again.
@triton.jit(do_not_specialize=["B", "cap"])
def _gather_qkv_kernel(
    x_ptr, w_ptr, b_ptr, idx_ptr, count_ptr, y_ptr,
    B, cap,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    # A block of rows lies within one part, query, key or value, of one head.
    BLOCKS: tl.constexpr = 3 * ((HEAD_DIM + BLOCK_N - 1) // BLOCK_N)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    token = offs_b.to(tl.int64)
    # The head of a block is asked for a block ahead, the first one's at the same time as the count.
    next_head = tl.load(idx_ptr + tl.program_id(0) // BLOCKS)
    for block in range(tl.program_id(0), tl.load(count_ptr) * BLOCKS, tl.num_programs(0)):
        head = next_head.to(tl.int64)
        next_head = tl.load(idx_ptr + tl.minimum((block + tl.num_programs(0)) // BLOCKS, cap - 1))
        slot = block // BLOCKS
        part = block % BLOCKS // (BLOCKS // 3)
        offs_r = block % (BLOCKS // 3) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_r < HEAD_DIM
        row = (head * 3 + part) * HEAD_DIM + offs_r
        y = rows_times_rows(x_ptr, token, mask_b, w_ptr, row, mask_n, D, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES)
        if HAS_BIAS:
            y += tl.load(b_ptr + row, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + ((token[:, None] * cap + slot) * 3 + part) * HEAD_DIM + offs_r[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_b[:, None] & mask_n[None, :])


def check_qkv(x, w, b, idx, count) -> None:
    """ValueError or TypeError for what `gather_qkv` refuses; w may be packed."""
    if x.dim() != 2 or len(w.shape) != 4 or w.shape[1] != 3 or w.shape[3] != x.shape[1]:
        raise ValueError(
            f"expected x [B, D] and w [H, 3, head_dim, D] with one D, got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if b is not None and b.shape != w.shape[:3]:
        raise ValueError(f"b must be {list(w.shape[:3])}, got {tuple(b.shape)}")
    check_gather(idx, count, w, 1)
    if x.dtype != w.dtype or (b is not None and b.dtype != x.dtype):
        raise TypeError(f"x, w and b must share one dtype, got {x.dtype}, {w.dtype}, {None if b is None else b.dtype}")
    if not all(t.is_contiguous() for t in (x, w, idx, b) if torch.is_tensor(t)):
        raise ValueError("x, w, b and idx must be contiguous; call .contiguous() once at load time, not per step")


def gather_qkv(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    config: Config | None = None,
) -> torch.Tensor:
    """Return qkv of the kept heads; shapes and limits are in the module docstring.

    Each kept row of `w` is read once for every 16 tokens. `config` overrides the tuned block sizes.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    check_qkv(x, w, b, idx, count)
    (B, D), head_dim, cap = x.shape, w.shape[2], idx.numel()
    y = torch.empty(B, cap, 3, head_dim, device=x.device, dtype=x.dtype)
    c = config or config_for("gather_qkv", B, D, x.dtype)
    grid = (min(cap * 3 * triton.cdiv(head_dim, c.block_n), c.programs), triton.cdiv(B, c.block_b))
    _gather_qkv_kernel[grid](
        x, w, b, idx, count, y,
        B, cap,
        D=D,
        HEAD_DIM=head_dim,
        HAS_BIAS=b is not None,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        DOT=c.dot,
        STAGES=c.stages,
        num_warps=c.warps,
        **launch_options(),
    )  # fmt: skip
    return y
