"""Query, key and value of the kept heads for one token a sequence; key and value go into the cache.

Only the rows of the heads kept by the step are read (Deja Vu, Liu et al. 2023, arXiv:2310.17157). The three parts of a
head lie together, so that a kept head is one contiguous piece of memory. A head that has missed earlier steps gets its
key and value of this one from `recover_kv` too, with those that it has missed: so each row is read once.

Shapes (B tokens, H heads, D hidden size, T cache capacity, cap = idx.numel(), K = count kept heads):
    x          [B, D]               contiguous
    w          [H, 3, head_dim, D]  contiguous; query, key and value rows of each head
    b          [H, 3, head_dim]     contiguous, or None
    idx        [cap]                int32, 0 <= idx[:K] < H, distinct; values are not checked (it would sync)
    count      [1]                  int32, 0 <= K <= cap
    k_cache    [B, H, T, head_dim]  contiguous, dtype of x; slot t of the kept heads is written
    v_cache    [B, H, T, head_dim]  likewise
    position   [1]                  int32, t, 0 <= t < T
    watermark  [H]                  int32, or None: heads whose watermark is below t have missed steps
    q          [B, cap, head_dim]   dtype of x, accumulated in fp32; slots from K on are unspecified
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.configs import Config, config_for, tiles_ahead
from dejavu_ds.kernels.gather_up_proj import check_gather, gather_up_proj_ref
from dejavu_ds.kernels.tiles import await_inputs, first_tiles, launch_options, rows_times_rows


def gather_qkv_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor,
    watermark: torch.Tensor | None = None,
    ahead: bool = False,
) -> torch.Tensor:
    """Plain torch twin of `gather_qkv`: same arguments, same result and side effect, rounded where torch rounds."""
    bias = None if b is None else b.flatten()
    qkv = gather_up_proj_ref(x, w.flatten(0, 2), bias, idx, count, group=3 * w.shape[2])
    return store_kv(qkv.view(x.shape[0], -1, 3, w.shape[2]), idx[: int(count)], k_cache, v_cache, position, watermark)


def store_kv(
    qkv: torch.Tensor,
    heads: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor,
    watermark: torch.Tensor | None,
) -> torch.Tensor:
    """Put keys and values of qkv [B, cap, 3, head_dim] into the caches, in the order of heads [K]; its queries."""
    t, heads = int(position), heads.long()
    slots = torch.arange(len(heads), device=heads.device)
    if watermark is not None:
        slots = slots[watermark[heads] >= t]
        heads = heads[slots]
    k_cache[:, heads, t], v_cache[:, heads, t] = qkv[:, slots, 1], qkv[:, slots, 2]
    return qkv[:, :, 0].contiguous()


@triton.jit
def _place(block, head, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a block of rows: its part of the head (0 query, 1 key, 2 value), places within, mask, numbers of rows of w.

    A block lies within one part of one head.
    """
    BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_N - 1) // BLOCK_N
    part = block // BLOCKS % 3
    offs_r = block % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    return part, offs_r, offs_r < HEAD_DIM, (head * 3 + part) * HEAD_DIM + offs_r


@triton.jit
def _is_ours(part, head, t, watermark_ptr):
    """Whether a part is computed here: queries always, keys and values of heads that have missed nothing."""
    ours = part >= 0
    if watermark_ptr is not None:
        ours = (part == 0) | (tl.load(watermark_ptr + head) >= t)
    return ours


@triton.jit
def _block_of_rows(
    x_ptr, w_ptr, b_ptr, q_ptr, k_ptr, v_ptr, first, block, head, part, offs_r, mask_n, row, token, mask_b, t,
    cap, H, T,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute and store a block of rows, of which `first` is there already."""
    y = rows_times_rows(x_ptr, token, mask_b, w_ptr, row, mask_n, first, D, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES)
    if HAS_BIAS:
        y += tl.load(b_ptr + row, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y = y.to(q_ptr.dtype.element_ty)
    mask = mask_b[:, None] & mask_n[None, :]
    place = ((token * H + head) * T + t)[:, None] * HEAD_DIM + offs_r[None, :]
    if part == 0:
        slot = block // (3 * ((HEAD_DIM + BLOCK_N - 1) // BLOCK_N))
        tl.store(q_ptr + (token * cap + slot)[:, None] * HEAD_DIM + offs_r[None, :], y, mask=mask)
    elif part == 1:
        tl.store(k_ptr + place, y, mask=mask)
    else:
        tl.store(v_ptr + place, y, mask=mask)


# Batch and capacities are not specialised: another one must not compile again.
@triton.jit(do_not_specialize=["B", "cap", "H", "T"])
def _gather_qkv_kernel(
    x_ptr, w_ptr, b_ptr, idx_ptr, count_ptr, q_ptr, k_ptr, v_ptr, position_ptr, watermark_ptr,
    B, cap, H, T,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    OF_HEAD: tl.constexpr = 3 * ((HEAD_DIM + BLOCK_N - 1) // BLOCK_N)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B
    token = offs_b.to(tl.int64)
    t = tl.load(position_ptr)
    # The head of a block is asked for a block ahead, the first one's at the same time as the count.
    next_head = tl.load(idx_ptr + tl.program_id(0) // OF_HEAD)
    begin, blocks = tl.program_id(0), tl.load(count_ptr) * OF_HEAD
    if AHEAD > 0:
        head = tl.where(begin < blocks, next_head, 0).to(tl.int64)
        next_head = tl.load(idx_ptr + tl.minimum((begin + tl.num_programs(0)) // OF_HEAD, cap - 1))
        part, offs_r, mask_n, row = _place(begin, head, HEAD_DIM, BLOCK_N)
        ours = (begin < blocks) & _is_ours(part, head, t, watermark_ptr)
        mask_n = offs_r < tl.where(ours, HEAD_DIM, 0)
        first = first_tiles(w_ptr, row, mask_n, AHEAD, D, BLOCK_D)
        await_inputs(EARLY)
        _block_of_rows(
            x_ptr, w_ptr, b_ptr, q_ptr, k_ptr, v_ptr, first, begin, head, part, offs_r, mask_n, row, token, mask_b, t,
            cap, H, T, D, HEAD_DIM, HAS_BIAS, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES,
        )  # fmt: skip
        begin += tl.num_programs(0)
    for block in range(begin, blocks, tl.num_programs(0)):
        head = next_head.to(tl.int64)
        next_head = tl.load(idx_ptr + tl.minimum((block + tl.num_programs(0)) // OF_HEAD, cap - 1))
        part, offs_r, mask_n, row = _place(block, head, HEAD_DIM, BLOCK_N)
        if _is_ours(part, head, t, watermark_ptr):
            _block_of_rows(
                x_ptr, w_ptr, b_ptr, q_ptr, k_ptr, v_ptr, (), block, head, part, offs_r, mask_n, row, token, mask_b, t,
                cap, H, T, D, HEAD_DIM, HAS_BIAS, BLOCK_B, BLOCK_N, BLOCK_D, DOT, STAGES,
            )  # fmt: skip


def check_qkv(x, w, b, idx, count, k_cache, v_cache, position, watermark) -> None:
    """ValueError or TypeError for what `gather_qkv` refuses; w may be packed."""
    if x.dim() != 2 or len(w.shape) != 4 or w.shape[1] != 3 or w.shape[3] != x.shape[1]:
        raise ValueError(
            f"expected x [B, D] and w [H, 3, head_dim, D] with one D, got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if b is not None and b.shape != w.shape[:3]:
        raise ValueError(f"b must be {list(w.shape[:3])}, got {tuple(b.shape)}")
    check_gather(idx, count, w, 1)
    B, (H, _, head_dim, _) = x.shape[0], w.shape
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape != (B, H, k_cache.shape[2], head_dim):
        raise ValueError(
            f"k_cache and v_cache must be [{B}, {H}, T, {head_dim}], got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if position.shape != (1,) or (watermark is not None and watermark.shape != (H,)):
        found = None if watermark is None else tuple(watermark.shape)
        raise ValueError(f"expected position [1] and watermark [{H}] or None, got {tuple(position.shape)} and {found}")
    floats = [t for t in (x, w, k_cache, v_cache, b) if t is not None]
    if len({t.dtype for t in floats}) != 1:
        raise TypeError(f"x, w, the caches and b must share one dtype, got {[t.dtype for t in floats]}")
    ints = [t for t in (position, watermark) if t is not None]
    if any(t.dtype != torch.int32 for t in ints):
        raise TypeError(f"position and watermark must be int32, got {[t.dtype for t in ints]}")
    if not all(t.is_contiguous() for t in (*floats, idx, *ints) if torch.is_tensor(t)):
        raise ValueError(
            "x, w, b, idx, watermark and the caches must be contiguous; call .contiguous() once at load time, not per "
            "step, and allocate the caches whole"
        )


def gather_qkv(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    idx: torch.Tensor,
    count: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor,
    watermark: torch.Tensor | None = None,
    config: Config | None = None,
    ahead: bool = False,
) -> torch.Tensor:
    """Return q of the kept heads, and store k and v of those that have missed nothing; see the module docstring.

    Each kept row of `w` is read once for every 16 tokens. `config` overrides the tuned block sizes. `ahead`: the launch
    before writes x alone of what is read here, so rows may be loaded while it still runs.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    check_qkv(x, w, b, idx, count, k_cache, v_cache, position, watermark)
    (B, D), head_dim, cap = x.shape, w.shape[2], idx.numel()
    q = torch.empty(B, cap, head_dim, device=x.device, dtype=x.dtype)
    c = config or config_for("gather_qkv", B, D, x.dtype)
    grid = (min(cap * 3 * triton.cdiv(head_dim, c.block_n), c.programs), triton.cdiv(B, c.block_b))
    _gather_qkv_kernel[grid](
        x, w, b, idx, count, q, k_cache, v_cache, position, watermark,
        B, cap, w.shape[0], k_cache.shape[2],
        D=D,
        HEAD_DIM=head_dim,
        HAS_BIAS=b is not None,
        BLOCK_B=c.block_b,
        BLOCK_N=c.block_n,
        BLOCK_D=c.block_d,
        DOT=c.dot,
        STAGES=c.stages,
        AHEAD=tiles_ahead(c, D, x.dtype) if ahead else 0,
        num_warps=c.warps,
        **launch_options(),
    )  # fmt: skip
    return q
