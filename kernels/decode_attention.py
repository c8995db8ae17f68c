"""Attention of one new token for the kept heads: softmax(scale * q @ K.T) @ V over the keys 0..t.

The context is cut into shares. A program attends for one head of one sequence over one share with the online softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867), and the one that finishes last merges the head's shares, as
Flash-Decoding does in a second launch (Dao et al. 2023). Heads that are not kept are neither read nor written (Deja
Vu, Liu et al. 2023, arXiv:2310.17157). How the context is cut follows from t alone, so that a head's bits depend
neither on the batch, nor on the heads beside it, nor on the cache's capacity.

Where heads may be skipped, the launch also moves the watermarks past what the step at t has stored (`recover_kv` says
what they are): a head in `mask`, or an overdue one, which has missed `window` positions, has keys and values up to
position t; any other is unchanged.

Count and position are read from device memory: the grid depends on the capacities alone, so the launch can be
captured in a CUDA graph and replayed at the next position.

Shapes (B sequences, H heads, T cache capacity, cap = head_idx.numel(), K = count kept heads):
    q         [B, cap, head_dim]     contiguous; query of head head_idx[s] in slot s
    k_cache   [B, H, T, head_dim]    contiguous, dtype of q; slots 0..t of the kept heads are read
    v_cache   [B, H, T, head_dim]    likewise
    head_idx  [cap]                  int32, distinct in [:K], any order; values are not checked (it would sync)
    count     [1]                    int32, 0 <= K <= cap
    position  [1]                    int32, t, 0 <= t < T, the slot of the new token
    key_mask  [B, T]                 bool, True where a key may be attended; slot t is attended whatever it says
    mask      [H]                    bool, the kept heads; needed with a watermark, else unused
    watermark [H]                    int32, moved in place; None where every head runs at every step
    recovered_total [1]              int64, or None; raised by the number of overdue heads that are not in `mask`, whose
                                     weights were read for the sake of their keys and values alone
    tickets   [>= B * cap]           int32 zeros that only launches in order share; left zero; None or too few: made for
                                     the call
    out       [B, cap, head_dim]     dtype of q, computed in fp32; slots from K on are unspecified
Keys beyond t may hold anything, and so may masked keys: they have no effect.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.tiles import await_inputs, is_last, launch_options


def decode_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    head_idx: torch.Tensor,
    count: torch.Tensor,
    position: torch.Tensor,
    key_mask: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    watermark: torch.Tensor | None = None,
    window: int = 0,
    recovered_total: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch twin of `decode_attention`: same arguments, same result and side effects; needs no tickets."""
    K, t = int(count), int(position)
    if watermark is not None:
        missing = t - watermark
        if recovered_total is not None:
            recovered_total += (~mask & (missing >= window)).sum()
        watermark.masked_fill_((missing >= window) | mask, t + 1)
    out = torch.empty_like(q)
    if K == 0:  # scaled_dot_product_attention does not take zero heads on every device
        return out
    heads = head_idx[:K].long()
    k, v = k_cache[:, heads, : t + 1], v_cache[:, heads, : t + 1]  # [B, K, t + 1, head_dim], copies
    attended = key_mask[:, : t + 1].clone()
    attended[:, t] = True
    if not attended.all():
        # A masked key may hold NaN, which no additive mask removes.
        hidden = ~attended[:, None, :, None]
        k, v = k.masked_fill_(hidden, 0.0), v.masked_fill_(hidden, 0.0)
    out[:, :K] = torch.nn.functional.scaled_dot_product_attention(
        q[:, :K, None], k, v, attn_mask=attended[:, None, None, :], scale=scale
    ).squeeze(2)
    return out


# Many programs of one warp, which sum without waiting for one another. Measured on an H200, as what follows.
_BLOCK_T = {2: 16, 4: 8}  # by bytes an element
_MAX_SHARES = 32
_WARPS = 1
# Up to here one program walks the whole context: a few more tiles cost less than a merge.
_ONE_SHARE_KEYS = 64
# 16 a multiprocessor of an H200; they share out heads and shares among themselves.
_MAX_PROGRAMS = 2112


@triton.jit
def _move_watermarks(mask_ptr, watermark_ptr, total_ptr, t, window, H, BLOCK: tl.constexpr):
    heads = tl.arange(0, BLOCK)
    mask_h = heads < H
    selected = tl.load(mask_ptr + heads, mask=mask_h, other=0) != 0
    watermark = tl.load(watermark_ptr + heads, mask=mask_h, other=0)
    missing = t - watermark
    if total_ptr is not None:
        recovered = mask_h & ~selected & (missing >= window)
        tl.store(total_ptr, tl.load(total_ptr) + tl.sum(recovered.to(tl.int32), axis=0))
    moved = tl.where(selected | (missing >= window), t + 1, watermark)
    tl.store(watermark_ptr + heads, moved, mask=mask_h)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, key_mask_ptr, first, end, t, scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first..end - 1 of a head: largest score, sum of weights, sum of weighted values."""
    offs_h = tl.arange(0, BLOCK_H)
    m, l, acc = float("-inf"), 0.0, tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(first, end, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        mask_t = offs_t < end
        # [BLOCK_T, BLOCK_H]
        kv = offs_t.to(tl.int64)[:, None] * HEAD_DIM + offs_h[None, :]
        mask = mask_t[:, None]
        if HEAD_DIM != BLOCK_H:
            mask = mask & (offs_h < HEAD_DIM)[None, :]
        # Masked keys are loaded too: to wait for the mask first would cost more than to read them.
        k = tl.load(k_ptr + kv, mask=mask, other=0.0)
        v = tl.load(v_ptr + kv, mask=mask, other=0.0)
        mask_t = mask_t & ((tl.load(key_mask_ptr + offs_t, mask=mask_t, other=0) != 0) | (offs_t == t))
        score = tl.where(mask_t, tl.sum(k.to(tl.float32) * q[None, :], axis=1) * scale, float("-inf"))
        v = tl.where(mask_t[:, None], v.to(tl.float32), 0.0)  # 0 * NaN would not be 0
        m_new = tl.maximum(m, tl.max(score, axis=0))
        # While all keys so far are masked the maximum is -inf, and -inf - -inf would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(score - shift)
        decay = tl.exp(m - shift)
        l = l * decay + tl.sum(p, axis=0)
        acc = acc * decay + tl.sum(p[:, None] * v, axis=0)
        m = m_new
    return m, l, acc


@triton.jit
def _merge(
    part_ptr, m_ptr, l_ptr, shares,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Attention [BLOCK_H] from the first `shares` partial results of a head, which other programs have stored."""
    offs_s = tl.arange(0, BLOCK_S)
    offs_h = tl.arange(0, BLOCK_H)
    mask_s = offs_s < shares
    m = tl.load(m_ptr + offs_s, mask=mask_s, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(l_ptr + offs_s, mask=mask_s, other=0.0, cache_modifier=".cg")
    # [BLOCK_S, BLOCK_H]
    acc = tl.load(
        part_ptr + offs_s[:, None] * HEAD_DIM + offs_h[None, :],
        mask=mask_s[:, None] & (offs_h < HEAD_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    weight = tl.exp(m - tl.max(m, axis=0))  # the last share holds the new token, so the maximum is finite
    return tl.sum(weight[:, None] * acc, axis=0) / tl.sum(weight * l, axis=0)


# The capacities are not specialised: another batch or cache must not compile again.
@triton.jit(do_not_specialize=["B", "cap", "H", "T", "window"])
def _decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, head_idx_ptr, count_ptr, position_ptr, key_mask_ptr, out_ptr,
    part_ptr, m_ptr, l_ptr, tickets_ptr,
    mask_ptr, watermark_ptr, total_ptr,
    scale, B, cap, H, T, window,
    HEAD_DIM: tl.constexpr,
    ONE_SHARE_KEYS: tl.constexpr,
    MAX_SHARES: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    K = tl.load(count_ptr)
    t = tl.load(position_ptr)
    # The last program has the least to attend to.
    if watermark_ptr is not None and tl.program_id(0) == tl.num_programs(0) - 1:
        _move_watermarks(mask_ptr, watermark_ptr, total_ptr, t, window, H, BLOCK_HEADS)

    keys = t + 1
    share, shares = keys, 1
    if CUT and keys > ONE_SHARE_KEYS:
        share = tl.cdiv(tl.cdiv(keys, MAX_SHARES), BLOCK_T) * BLOCK_T
        shares = tl.cdiv(keys, share)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEAD_DIM

    # The shares of a head are neighbours, so that it is soon complete.
    for item in range(tl.program_id(0), B * K * shares, tl.num_programs(0)):
        split = item % shares
        slot = (item // shares) % K
        batch = (item // shares // K).to(tl.int64)
        place = batch * cap + slot
        head = tl.load(head_idx_ptr + slot).to(tl.int64)
        q = tl.load(q_ptr + place * HEAD_DIM + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        cache = (batch * H + head) * T * HEAD_DIM
        first = split * share
        m, l, acc = _attend(
            q, k_ptr + cache, v_ptr + cache, key_mask_ptr + batch * T,
            first, tl.minimum(first + share, keys), t, scale, HEAD_DIM, BLOCK_T, BLOCK_H,
        )  # fmt: skip

        out_ptrs = out_ptr + place * HEAD_DIM + offs_h
        if CUT and shares > 1:
            part = place * MAX_SHARES
            tl.store(m_ptr + part + split, m)
            tl.store(l_ptr + part + split, l)
            tl.store(part_ptr + (part + split) * HEAD_DIM + offs_h, acc, mask=mask_h)
            if is_last(tickets_ptr + place, shares):
                part_ptrs = part_ptr + part * HEAD_DIM
                y = _merge(part_ptrs, m_ptr + part, l_ptr + part, shares, HEAD_DIM, MAX_SHARES, BLOCK_H)
                tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_h)
        else:
            tl.store(out_ptrs, (acc / l).to(out_ptr.dtype.element_ty), mask=mask_h)


def _check(q, k_cache, v_cache, head_idx, count, position, key_mask, tickets) -> None:
    if q.dim() != 3:
        raise ValueError(f"q must be [B, cap, head_dim], got {tuple(q.shape)}")
    B, cap, head_dim = q.shape
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[::3] != (B, head_dim):
        raise ValueError(
            f"for q {tuple(q.shape)}, k_cache and v_cache must be [{B}, H, T, {head_dim}], got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if head_idx.shape != (cap,) or count.shape != (1,) or position.shape != (1,):
        raise ValueError(
            f"expected head_idx [{cap}], count [1] and position [1], got "
            f"{tuple(head_idx.shape)}, {tuple(count.shape)} and {tuple(position.shape)}"
        )
    if key_mask.shape != (B, k_cache.shape[2]):
        raise ValueError(f"key_mask must be [{B}, {k_cache.shape[2]}], got {tuple(key_mask.shape)}")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(f"q and caches must share one dtype, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if not head_idx.dtype == count.dtype == position.dtype == torch.int32:
        raise TypeError(
            f"head_idx, count and position must be int32, got {head_idx.dtype}, {count.dtype} and {position.dtype}"
        )
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be bool, got {key_mask.dtype}")
    if not all(t.is_contiguous() for t in (q, k_cache, v_cache, head_idx, key_mask)):
        raise ValueError("q, k_cache, v_cache, head_idx and key_mask must be contiguous; allocate the caches whole")
    if tickets is not None and tickets.dtype != torch.int32:
        raise TypeError(f"tickets must be int32, got {tickets.dtype}")


def _check_watermark(H: int, mask, watermark, window, recovered_total) -> None:
    if watermark is None:
        if recovered_total is not None:
            raise ValueError("recovered_total is counted from a watermark: pass both or neither")
        return
    if watermark.shape != (H,) or mask is None or mask.shape != (H,):
        raise ValueError(
            f"expected watermark [{H}] and with it mask [{H}], got {tuple(watermark.shape)} and "
            f"{None if mask is None else tuple(mask.shape)}"
        )
    if window < 1:
        raise ValueError(f"window must be at least 1 with a watermark, got {window}")
    if watermark.dtype != torch.int32 or mask.dtype != torch.bool:
        raise TypeError(f"watermark must be int32 and mask bool, got {watermark.dtype} and {mask.dtype}")
    if not (watermark.is_contiguous() and mask.is_contiguous()):
        raise ValueError("watermark and mask must be contiguous; allocate them whole")
    if recovered_total is not None and (recovered_total.shape != (1,) or recovered_total.dtype != torch.int64):
        raise ValueError(
            f"recovered_total must be [1] int64, got {tuple(recovered_total.shape)} {recovered_total.dtype}"
        )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    head_idx: torch.Tensor,
    count: torch.Tensor,
    position: torch.Tensor,
    key_mask: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    watermark: torch.Tensor | None = None,
    window: int = 0,
    recovered_total: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend for the kept heads of the token at `position`, and move the watermarks.

    Shapes and limits are in the module docstring; `scale` multiplies the scores (1 / sqrt(head_dim) as a rule).

    Raises:
        ValueError: wrong shapes, tensors that are not contiguous, a watermark without mask or window.
        TypeError: wrong or mixed dtypes.
    """
    _check(q, k_cache, v_cache, head_idx, count, position, key_mask, tickets)
    B, cap, head_dim = q.shape
    H, T = k_cache.shape[1:3]
    _check_watermark(H, mask, watermark, window, recovered_total)
    out = torch.empty_like(q)
    block_t = _BLOCK_T[q.element_size()]
    # At most T keys: the heads of a short cache are never cut.
    shares = 1 if T <= _ONE_SHARE_KEYS else min(_MAX_SHARES, triton.cdiv(T, block_t))
    part, m, l = None, None, None
    if shares > 1:
        part = torch.empty(B, cap, _MAX_SHARES, head_dim, device=q.device, dtype=torch.float32)
        m, l = torch.empty(2, B, cap, _MAX_SHARES, device=q.device, dtype=torch.float32)
        if tickets is None or tickets.numel() < B * cap:
            tickets = torch.zeros(B * cap, device=q.device, dtype=torch.int32)
    _decode_attention_kernel[(max(1, min(B * cap * shares, _MAX_PROGRAMS)),)](
        q, k_cache, v_cache, head_idx, count, position, key_mask.view(torch.uint8), out,
        part, m, l, tickets if shares > 1 else None,
        None if watermark is None else mask.view(torch.uint8), watermark, recovered_total,
        float(scale), B, cap, H, T, window,
        HEAD_DIM=head_dim,
        ONE_SHARE_KEYS=_ONE_SHARE_KEYS,
        MAX_SHARES=_MAX_SHARES,
        CUT=shares > 1,
        BLOCK_T=block_t,
        BLOCK_H=triton.next_power_of_2(head_dim),
        BLOCK_HEADS=triton.next_power_of_2(H),
        num_warps=_WARPS,
        **launch_options(),
    )  # fmt: skip
    return out
