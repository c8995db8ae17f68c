"""Attention of one new token for the kept heads: softmax(scale * q @ K.T) @ V over the keys 0..t.

One program attends for one head of one sequence over a share of the context with the online softmax (Milakov and
Gimelshein 2018, arXiv:1805.02867); a second kernel merges the shares, as in Flash-Decoding (Dao et al. 2023). Heads
that are not kept are neither read nor written (Deja Vu, Liu et al. 2023, arXiv:2310.17157).

The new token's key and value come from `qkv` and are stored into slot t of the caches by the same launch. The cache
is read below t only, so no program can see whether that store has happened yet.

Count and position are read from device memory: the grid depends on the capacities alone, so the launch can be
captured in a CUDA graph and replayed at the next position.

Shapes (B sequences, H heads, T cache capacity, cap = head_idx.numel(), K = count kept heads):
    qkv       [B, cap, 3, head_dim]  contiguous; query, key and value of head head_idx[s] in slot s
    k_cache   [B, H, T, head_dim]    contiguous, dtype of qkv; slot t of the kept heads is written
    v_cache   [B, H, T, head_dim]    likewise
    head_idx  [cap]                  int32, distinct in [:K], any order; values are not checked (it would sync)
    count     [1]                    int32, 0 <= K <= cap
    position  [1]                    int32, t, 0 <= t < T, the slot of the new token
    key_mask  [B, T]                 bool, True where a key may be attended; slot t is attended whatever it says
    out       [B, cap, head_dim]     dtype of qkv, computed in fp32; slots from K on are unspecified
Keys beyond t and masked keys are not loaded, so they may hold anything.
"""

import torch
import triton
import triton.language as tl


def decode_attention_ref(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    head_idx: torch.Tensor,
    count: torch.Tensor,
    position: torch.Tensor,
    key_mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Plain torch twin of `decode_attention`: same arguments, same result and side effect."""
    K, t = int(count), int(position)
    out = torch.empty(qkv.shape[0], qkv.shape[1], qkv.shape[3], device=qkv.device, dtype=qkv.dtype)
    if K == 0:  # scaled_dot_product_attention does not take zero heads on every device
        return out
    heads = head_idx[:K].long()
    q, k_new, v_new = qkv[:, :K].unbind(2)
    k_cache[:, heads, t] = k_new
    v_cache[:, heads, t] = v_new
    k, v = k_cache[:, heads, : t + 1], v_cache[:, heads, : t + 1]  # [B, K, t + 1, head_dim], copies
    attended = key_mask[:, : t + 1].clone()
    attended[:, t] = True
    if not attended.all():
        # A masked key may hold NaN, which no additive mask removes.
        hidden = ~attended[:, None, :, None]
        k, v = k.masked_fill_(hidden, 0.0), v.masked_fill_(hidden, 0.0)
    out[:, :K] = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k, v, attn_mask=attended[:, None, None, :], scale=scale
    ).squeeze(2)
    return out


# A tile of BLOCK_T keys is BLOCK_T * head_dim <= 4096 elements for heads of up to 128.
_BLOCK_T = 32
# Below this capacity one program walks the whole context; above, a share is about _KEYS_PER_SPLIT keys long.
_ONE_SPLIT_T = 256
_KEYS_PER_SPLIT = 128
_MAX_SPLITS = 32


# The capacities are not specialised: another batch or cache must not compile again.
@triton.jit(do_not_specialize=["cap", "H", "T"])
def _attend_kernel(
    qkv_ptr, k_ptr, v_ptr, head_idx_ptr, count_ptr, position_ptr, key_mask_ptr, out_ptr, m_ptr, l_ptr,
    scale, cap, H, T,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if slot >= tl.load(count_ptr):
        return
    t = tl.load(position_ptr)
    head = tl.load(head_idx_ptr + slot).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEAD_DIM

    qkv_ptrs = qkv_ptr + (batch * cap + slot) * 3 * HEAD_DIM + offs_h
    q = tl.load(qkv_ptrs, mask=mask_h, other=0.0).to(tl.float32)
    k_new = tl.load(qkv_ptrs + HEAD_DIM, mask=mask_h, other=0.0)
    v_new = tl.load(qkv_ptrs + 2 * HEAD_DIM, mask=mask_h, other=0.0)
    cache = (batch * H + head) * T * HEAD_DIM

    # Share 0 owns the new token: it starts from it and stores it.
    owner = split == 0
    new_ptrs = cache + t.to(tl.int64) * HEAD_DIM + offs_h
    mask_new = offs_h < tl.where(owner, HEAD_DIM, 0)
    tl.store(k_ptr + new_ptrs, k_new, mask=mask_new)
    tl.store(v_ptr + new_ptrs, v_new, mask=mask_new)
    m = tl.where(owner, tl.sum(q * k_new.to(tl.float32), axis=0) * scale, float("-inf"))
    l = tl.where(owner, 1.0, 0.0)
    acc = tl.where(owner, v_new.to(tl.float32), 0.0)

    share = tl.cdiv(tl.cdiv(t, SPLITS), BLOCK_T) * BLOCK_T
    first = split * share
    for start in range(first, tl.minimum(first + share, t), BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        mask_t = offs_t < t
        mask_t = mask_t & (tl.load(key_mask_ptr + batch * T + offs_t, mask=mask_t, other=0) != 0)
        # [BLOCK_T, BLOCK_H]
        kv_ptrs = cache + offs_t.to(tl.int64)[:, None] * HEAD_DIM + offs_h[None, :]
        mask = mask_t[:, None] & mask_h[None, :]
        k = tl.load(k_ptr + kv_ptrs, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + kv_ptrs, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(mask_t, tl.sum(k * q[None, :], axis=1) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=0))
        # While all keys so far are masked the maximum is -inf, and -inf - -inf would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(score - shift)
        decay = tl.exp(m - shift)
        l = l * decay + tl.sum(p, axis=0)
        acc = acc * decay + tl.sum(p[:, None] * v, axis=0)
        m = m_new

    part = (batch * cap + slot) * SPLITS + split
    if SPLITS == 1:
        acc = acc / l
    else:
        tl.store(m_ptr + part, m)
        tl.store(l_ptr + part, l)
    tl.store(out_ptr + part * HEAD_DIM + offs_h, acc.to(out_ptr.dtype.element_ty), mask=mask_h)


@triton.jit(do_not_specialize=["cap"])
def _merge_shares_kernel(
    part_ptr, m_ptr, l_ptr, count_ptr, out_ptr,
    cap,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    if slot >= tl.load(count_ptr):
        return
    out = tl.program_id(1).to(tl.int64) * cap + slot
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < SPLITS
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEAD_DIM
    part = out * SPLITS + offs_s
    m = tl.load(m_ptr + part, mask=mask_s, other=float("-inf"))
    l = tl.load(l_ptr + part, mask=mask_s, other=0.0)
    # [BLOCK_S, BLOCK_H]
    acc = tl.load(
        part_ptr + part[:, None] * HEAD_DIM + offs_h[None, :], mask=mask_s[:, None] & mask_h[None, :], other=0.0
    )
    weight = tl.exp(m - tl.max(m, axis=0))  # share 0 holds the new token, so the maximum is finite
    y = tl.sum(weight[:, None] * acc, axis=0) / tl.sum(weight * l, axis=0)
    tl.store(out_ptr + out * HEAD_DIM + offs_h, y.to(out_ptr.dtype.element_ty), mask=mask_h)


def _check(qkv, k_cache, v_cache, head_idx, count, position, key_mask) -> None:
    if qkv.dim() != 4 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must be [B, cap, 3, head_dim], got {tuple(qkv.shape)}")
    B, cap, _, head_dim = qkv.shape
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[::3] != (B, head_dim):
        raise ValueError(
            f"for qkv {tuple(qkv.shape)}, k_cache and v_cache must be [{B}, H, T, {head_dim}], got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if head_idx.shape != (cap,) or count.shape != (1,) or position.shape != (1,):
        raise ValueError(
            f"expected head_idx [{cap}], count [1] and position [1], got "
            f"{tuple(head_idx.shape)}, {tuple(count.shape)} and {tuple(position.shape)}"
        )
    if key_mask.shape != (B, k_cache.shape[2]):
        raise ValueError(f"key_mask must be [{B}, {k_cache.shape[2]}], got {tuple(key_mask.shape)}")
    if not qkv.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(f"qkv and caches must share one dtype, got {qkv.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if not head_idx.dtype == count.dtype == position.dtype == torch.int32:
        raise TypeError(
            f"head_idx, count and position must be int32, got {head_idx.dtype}, {count.dtype} and {position.dtype}"
        )
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be bool, got {key_mask.dtype}")
    if not all(t.is_contiguous() for t in (qkv, k_cache, v_cache, head_idx, key_mask)):
        raise ValueError("qkv, k_cache, v_cache, head_idx and key_mask must be contiguous; allocate the caches whole")


def decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    head_idx: torch.Tensor,
    count: torch.Tensor,
    position: torch.Tensor,
    key_mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend for the kept heads of the token at `position` and store its keys and values into the caches.

    Shapes and limits are in the module docstring; `scale` multiplies the scores (1 / sqrt(head_dim) as a rule).

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    _check(qkv, k_cache, v_cache, head_idx, count, position, key_mask)
    B, cap, _, head_dim = qkv.shape
    H, T = k_cache.shape[1:3]
    splits = 1 if T <= _ONE_SPLIT_T else min(triton.cdiv(T, _KEYS_PER_SPLIT), _MAX_SPLITS)
    block_h = triton.next_power_of_2(head_dim)
    out = torch.empty(B, cap, head_dim, device=qkv.device, dtype=qkv.dtype)
    part, m, l = out, None, None
    if splits > 1:
        part = torch.empty(B, cap, splits, head_dim, device=qkv.device, dtype=torch.float32)
        m, l = torch.empty(2, B, cap, splits, device=qkv.device, dtype=torch.float32)
    _attend_kernel[(cap, B, splits)](
        qkv, k_cache, v_cache, head_idx, count, position, key_mask.view(torch.uint8), part, m, l,
        float(scale), cap, H, T,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        BLOCK_T=_BLOCK_T,
        BLOCK_H=block_h,
    )  # fmt: skip
    if splits > 1:
        _merge_shares_kernel[(cap, B)](
            part, m, l, count, out,
            cap,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_H=block_h,
        )  # fmt: skip
    return out
