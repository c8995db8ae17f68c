"""Recovery of missing keys and values: k, v = x[p] @ w_k.T + b_k, x[p] @ w_v.T + b_v for the positions a head missed.

A head that is not selected writes no keys and values. Deja Vu (Liu et al. 2023, arXiv:2310.17157, section 4.2) keeps
the attention input of such tokens instead and computes the missing keys and values when the head is next selected.
What a head misses is one run of positions, so a watermark says it all: positions below watermark[h] have keys and
values. The inputs live in a ring of W positions, so a head that is about to lose its oldest input is recovered too,
selected or not ("overdue").

Call `recover_kv`, then write the input of position t into the ring, then call `advance_watermark`: the ring may be
written at t only after overdue heads were recovered from the input that stood there.

Shapes (B sequences, H heads, D hidden size, W ring length, T cache capacity):
    inputs     [B, W, D]            contiguous; normalised attention input of position p at p % W
    w          [H, 3, head_dim, D]  contiguous, dtype of inputs; query, key and value rows of each head
    b          [H, 3, head_dim]     contiguous, or None
    selected   [H]                  bool
    watermark  [H]                  int32, 0 <= t - watermark <= W for a head whose inputs are all in the ring
    position   [1]                  int32, t, the position being decoded; its own input is not read
    k_cache    [B, H, T, head_dim]  contiguous, dtype of inputs; slots watermark..t-1 of the heads concerned are written
    v_cache    [B, H, T, head_dim]  likewise
All counts are read from device memory, so the launch can be captured in a CUDA graph and replayed.
"""

import torch
import triton
import triton.language as tl


def recover_kv_ref(
    inputs: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    selected: torch.Tensor,
    watermark: torch.Tensor,
    position: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Plain torch twin of `recover_kv`: same arguments, same result, rounded where torch rounds."""
    W, t = inputs.shape[1], int(position)
    missing = t - watermark
    due = (missing > 0) & (selected | (missing >= W))
    for head in due.nonzero().flatten().tolist():
        first = int(watermark[head])
        x = inputs[:, torch.arange(first, t, device=inputs.device) % W]  # [B, missing, D]
        for cache, part in ((k_cache, 1), (v_cache, 2)):
            bias = None if b is None else b[head, part]
            cache[:, head, first:t] = torch.nn.functional.linear(x, w[head, part], bias)


def advance_watermark(watermark: torch.Tensor, selected: torch.Tensor, position: torch.Tensor, W: int) -> None:
    """Move `watermark` [H] int32 in place past what the step at `position` [1] int32 has stored.

    A selected head has keys and values up to position t (`selected` [H] bool); an overdue one, whose oldest input the
    ring of length `W` is about to lose, was recovered up to t - 1; any other is unchanged. Plain torch without a
    read-back, so it can be captured in a CUDA graph.
    """
    recovered = torch.where(position - watermark >= W, position, watermark)
    watermark.copy_(torch.where(selected, position + 1, recovered))


# Runs are short as a rule (a head rests for a few tokens), so few items share a tile; rows and D as in up-projection.
# The fp32 accumulator holds BLOCK_I * BLOCK_R * BLOCK_D = 8192 elements, 64 registers a thread of 4 warps.
_BLOCK_I = 4
_BLOCK_R = 2
_BLOCK_D = 1024


# Only D, which decides how wide a load can be, is specialised: another batch or cache must not compile again.
@triton.jit(do_not_specialize=["B", "H", "W", "T"])
def _recover_kv_kernel(
    inputs_ptr, w_ptr, b_ptr, selected_ptr, watermark_ptr, position_ptr, k_ptr, v_ptr,
    B, H, D, W, T,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    t = tl.load(position_ptr)
    first = tl.load(watermark_ptr + head)
    due = (tl.load(selected_ptr + head) != 0) | (t - first >= W)
    # An item is one missing position of one sequence; all B sequences of a position are neighbours.
    items = tl.where(due, tl.maximum(t - first, 0) * B, 0)

    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # the key rows of the head, then its value rows
    mask_r = offs_r < 2 * HEAD_DIM
    is_key = offs_r < HEAD_DIM
    row = (head * 3 + 1) * HEAD_DIM + offs_r
    for i in range(0, items, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        mask_i = offs_i < items
        batch = (offs_i % B).to(tl.int64)
        pos = (first + offs_i // B).to(tl.int64)
        x_row = batch * W + pos % W
        acc = tl.zeros((BLOCK_I, BLOCK_R, BLOCK_D), dtype=tl.float32)
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            mask_d = offs_d < D
            # [1, BLOCK_R, BLOCK_D]
            w = tl.load(
                w_ptr + row[None, :, None] * D + offs_d[None, None, :],
                mask=mask_r[None, :, None] & mask_d[None, None, :],
                other=0.0,
            ).to(tl.float32)
            # [BLOCK_I, 1, BLOCK_D]
            x = tl.load(
                inputs_ptr + x_row[:, None, None] * D + offs_d[None, None, :],
                mask=mask_i[:, None, None] & mask_d[None, None, :],
                other=0.0,
            ).to(tl.float32)
            acc += x * w
        y = tl.sum(acc, axis=2)  # [BLOCK_I, BLOCK_R]
        if HAS_BIAS:
            y += tl.load(b_ptr + row, mask=mask_r, other=0.0).to(tl.float32)[None, :]
        y = y.to(k_ptr.dtype.element_ty)
        out = ((batch * H + head) * T + pos)[:, None] * HEAD_DIM + (offs_r % HEAD_DIM)[None, :]
        mask = mask_i[:, None] & mask_r[None, :]
        tl.store(k_ptr + out, y, mask=mask & is_key[None, :])
        tl.store(v_ptr + out, y, mask=mask & (offs_r >= HEAD_DIM)[None, :])


def _check(inputs, w, b, selected, watermark, position, k_cache, v_cache) -> None:
    if inputs.dim() != 3:
        raise ValueError(f"inputs must be [B, W, D], got {tuple(inputs.shape)}")
    B, _, D = inputs.shape
    if w.dim() != 4 or w.shape[1] != 3 or w.shape[3] != D:
        raise ValueError(f"w must be [H, 3, head_dim, {D}], got {tuple(w.shape)}")
    H, _, head_dim, _ = w.shape
    if b is not None and b.shape != (H, 3, head_dim):
        raise ValueError(f"b must be [{H}, 3, {head_dim}], got {tuple(b.shape)}")
    if selected.shape != (H,) or watermark.shape != (H,) or position.shape != (1,):
        raise ValueError(
            f"expected selected [{H}], watermark [{H}] and position [1], got "
            f"{tuple(selected.shape)}, {tuple(watermark.shape)} and {tuple(position.shape)}"
        )
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape != (B, H, k_cache.shape[2], head_dim):
        raise ValueError(
            f"k_cache and v_cache must be [{B}, {H}, T, {head_dim}], got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    floats = (inputs, w, k_cache, v_cache) + (() if b is None else (b,))
    if len({x.dtype for x in floats}) != 1:
        raise TypeError(f"inputs, w, caches and b must share one dtype, got {[x.dtype for x in floats]}")
    if selected.dtype != torch.bool or watermark.dtype != torch.int32 or position.dtype != torch.int32:
        raise TypeError(
            "selected must be bool, watermark and position int32, got "
            f"{selected.dtype}, {watermark.dtype} and {position.dtype}"
        )
    if not all(x.is_contiguous() for x in (*floats, selected, watermark)):
        raise ValueError("inputs, w, b, selected, watermark and the caches must be contiguous; allocate them whole")


def recover_kv(
    inputs: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    selected: torch.Tensor,
    watermark: torch.Tensor,
    position: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Store the missing keys and values of every head that is selected or overdue; see the module docstring.

    The watermark is only read: `advance_watermark` moves it at the end of the step.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    _check(inputs, w, b, selected, watermark, position, k_cache, v_cache)
    B, W, D = inputs.shape
    H, _, head_dim, _ = w.shape
    _recover_kv_kernel[(triton.cdiv(2 * head_dim, _BLOCK_R), H)](
        inputs, w, b, selected.view(torch.uint8), watermark, position, k_cache, v_cache,
        B, H, D, W, k_cache.shape[2],
        HEAD_DIM=head_dim,
        HAS_BIAS=b is not None,
        BLOCK_I=_BLOCK_I,
        BLOCK_R=_BLOCK_R,
        BLOCK_D=min(_BLOCK_D, triton.next_power_of_2(D)),
    )  # fmt: skip
