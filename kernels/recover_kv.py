"""Recovery of missing keys and values: k, v = x[p] @ w_k.T + b_k, x[p] @ w_v.T + b_v from the first missing one on.

A head that is not selected writes no keys and values. Deja Vu (Liu et al. 2023, arXiv:2310.17157, section 4.2) keeps
the attention input of such tokens instead and computes the missing keys and values when the head is next selected.
What a head misses is one run of positions, so a watermark says it all: positions below watermark[h] have keys and
values. A head that has missed W positions, the window, is recovered too, selected or not ("overdue"), so a ring of the
last inputs is enough. Position t, which is being decoded, is the last of the run: the same weights make its key and
value, which `gather_qkv`, running beside, then need not read.

The watermark is only read; `decode_attention` moves it at the end of the step.

Most heads have missed a few tokens, where the time goes into waiting for memory, not into products.

Shapes (B sequences, H heads, D hidden size, R ring length, W window, T cache capacity):
    inputs     [B, R, D]            contiguous, R > W; normalised attention input of position p <= t at p % R
    w          [H, 3, head_dim, D]  contiguous, dtype of inputs; query, key and value rows of each head
    b          [H, 3, head_dim]     contiguous, or None
    selected   [H]                  bool
    watermark  [H]                  int32, 0 <= t - watermark < R for a head whose inputs are all in the ring
    position   [1]                  int32, t, the position being decoded
    k_cache    [B, H, T, head_dim]  contiguous, dtype of inputs; slots watermark..t of the heads concerned are written
    v_cache    [B, H, T, head_dim]  likewise
With missing = t - watermark, the heads concerned are the selected ones with missing > 0, and all with missing >= W.
All counts are read from device memory, so the launch can be captured in a CUDA graph and replayed.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.tiles import await_inputs, dot, launch_options


def recover_kv_ref(
    inputs: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    selected: torch.Tensor,
    watermark: torch.Tensor,
    position: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    window: int,
) -> None:
    """Plain torch twin of `recover_kv`: same arguments, same result, rounded where torch rounds."""
    R, t = inputs.shape[1], int(position)
    missing = t - watermark
    due = (selected & (missing > 0)) | (missing >= window)
    for head in due.nonzero().flatten().tolist():
        first = int(watermark[head])
        x = inputs[:, torch.arange(first, t + 1, device=inputs.device) % R]  # [B, missing + 1, D]
        for cache, part in ((k_cache, 1), (v_cache, 2)):
            bias = None if b is None else b[head, part]
            cache[:, head, first : t + 1] = torch.nn.functional.linear(x, w[head, part], bias)


# An item is one position of one sequence. Heads with up to _FEW of them are seen to in tiles of few items, others in
# tiles of many: by bytes an element (items, rows, columns for each of _SPLIT groups, stages of the pipeline). More
# stages are no faster alone, and their shared memory is taken from the L1 cache of what runs beside. Exact products of
# fp32 take no tensor cores, so their tiles must fit into registers.
_FEW = 64
_TILES = {2: ((16, 16, 64, 4), (64, 16, 32, 3)), 4: ((16, 16, 32, 4), (16, 16, 32, 4))}
# Groups of columns, one a warp: products of a row follow one another, a quarter of them at a time.
_SPLIT = 4
# One a multiprocessor of an H200.
_PROGRAMS = 132


@triton.jit
def _recover_tile(
    inputs_ptr, w_ptr, b_ptr, k_ptr, v_ptr,
    head, first, items, part, B, H, R, T,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Keys and values of some of a head's rows for some of its items."""
    offs_r, row, offs_i, x_row = place_tile(part, head, first, items, B, R, HEAD_DIM, BLOCK_I, BLOCK_R)
    y = tl.zeros((SPLIT, BLOCK_R, BLOCK_I), dtype=tl.float32)
    for d in tl.range(0, D, SPLIT * BLOCK_D, num_stages=STAGES):
        offs_d = d + tl.arange(0, SPLIT)[:, None, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, None, :]
        w_ptrs = w_ptr + row[None, :, None] * D + offs_d
        x_ptrs = inputs_ptr + x_row[None, :, None] * D + offs_d
        if D % (SPLIT * BLOCK_D) == 0:
            w = tl.load(w_ptrs, eviction_policy="evict_first")
            x = tl.load(x_ptrs)
        else:
            w = tl.load(w_ptrs, mask=offs_d < D, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=offs_d < D, other=0.0)
        y = dot(w, tl.permute(x, (0, 2, 1)), y)
    store_tile(
        tl.sum(y, axis=0), b_ptr, k_ptr, v_ptr, head, first, items, offs_r, row, offs_i, B, H, T, HEAD_DIM
    )  # fmt: skip


@triton.jit
def _recover_tiles(
    inputs_ptr, w_ptr, b_ptr, k_ptr, v_ptr,
    concerned, watermark, t, B, H, R, T,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Keys and values of the heads concerned, tile by tile, all tiles spread over the programs."""
    TILES: tl.constexpr = (2 * HEAD_DIM + BLOCK_R - 1) // BLOCK_R
    parts = tl.where(concerned, tl.cdiv((t + 1 - watermark) * B, BLOCK_I) * TILES, 0)
    end = tl.cumsum(parts, axis=0)
    for i in range(tl.program_id(0), tl.sum(parts, axis=0), tl.num_programs(0)):
        head, first, part = head_of(i, parts, end, watermark, BLOCK_HEADS)
        _recover_tile(
            inputs_ptr, w_ptr, b_ptr, k_ptr, v_ptr, head, first, (t + 1 - first) * B, part, B, H, R, T,
            D, HEAD_DIM, BLOCK_I, BLOCK_R, BLOCK_D, SPLIT, STAGES,
        )  # fmt: skip


@triton.jit
def head_of(i, parts, end, watermark, BLOCK_HEADS: tl.constexpr):
    """Part i of all heads' parts, of which each head has as many as `parts` says and `end` adds up: its head, in int64,
    that head's watermark, and its place among the head's parts."""
    ours = (i >= end - parts) & (i < end)
    head = tl.sum(tl.where(ours, tl.arange(0, BLOCK_HEADS), 0), axis=0).to(tl.int64)
    first = tl.sum(tl.where(ours, watermark, 0), axis=0)
    return head, first, i - tl.sum(tl.where(ours, end - parts, 0), axis=0)


@triton.jit
def place_tile(
    part, head, first, items, B, R,
    HEAD_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Of part `part` of a head: its rows, first those of the keys, then those of the values, their places in w, its
    items, and the inputs of these.

    Rows and items that overrun the tile repeat the last one: nothing is masked but the stores.
    """
    TILES: tl.constexpr = (2 * HEAD_DIM + BLOCK_R - 1) // BLOCK_R
    offs_r = part % TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_i = part // TILES * BLOCK_I + tl.arange(0, BLOCK_I)
    row = (head * 3 + 1) * HEAD_DIM + tl.minimum(offs_r, 2 * HEAD_DIM - 1)
    item = tl.minimum(offs_i, items - 1)
    x_row = (item % B).to(tl.int64) * R + (first + item // B) % R
    return offs_r, row, offs_i, x_row


@triton.jit
def store_tile(
    y, b_ptr, k_ptr, v_ptr, head, first, items, offs_r, row, offs_i, B, H, T,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """y [rows, items] of a tile from `place_tile`, with the bias added."""
    if b_ptr is not None:
        y += tl.load(b_ptr + row).to(tl.float32)[:, None]
    y = y.to(k_ptr.dtype.element_ty)
    batch = (offs_i % B).to(tl.int64)  # all B sequences of a position are neighbours
    out = ((batch * H + head) * T + first + offs_i // B)[None, :] * HEAD_DIM + (offs_r % HEAD_DIM)[:, None]
    mask_i = (offs_i < items)[None, :]
    tl.store(k_ptr + out, y, mask=mask_i & (offs_r < HEAD_DIM)[:, None])
    tl.store(v_ptr + out, y, mask=mask_i & ((offs_r >= HEAD_DIM) & (offs_r < 2 * HEAD_DIM))[:, None])


@triton.jit
def due_heads(selected_ptr, watermark_ptr, position_ptr, H, window, BLOCK_HEADS: tl.constexpr):
    """Of each head whether it is to be recovered, and its watermark; how many are."""
    heads = tl.arange(0, BLOCK_HEADS)
    mask_h = heads < H
    selected = tl.load(selected_ptr + heads, mask=mask_h, other=0) != 0
    watermark = tl.load(watermark_ptr + heads, mask=mask_h, other=0)
    missing = tl.load(position_ptr) - watermark
    due = mask_h & ((selected & (missing > 0)) | (missing >= window))
    return due, watermark, tl.sum(due.to(tl.int32), axis=0)


# D is a size of the model; another batch, ring or cache must not compile again.
@triton.jit(do_not_specialize=["B", "H", "R", "T", "window", "few"])
def _recover_kv_kernel(
    inputs_ptr, w_ptr, b_ptr, selected_ptr, watermark_ptr, position_ptr, k_ptr, v_ptr,
    B, H, R, T, window, few,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    FEW_I: tl.constexpr,
    FEW_R: tl.constexpr,
    FEW_D: tl.constexpr,
    FEW_STAGES: tl.constexpr,
    MANY_I: tl.constexpr,
    MANY_R: tl.constexpr,
    MANY_D: tl.constexpr,
    MANY_STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """few  heads that miss fewer positions are seen to in tiles of few items"""
    await_inputs(EARLY)
    due, watermark, heads_due = due_heads(selected_ptr, watermark_ptr, position_ptr, H, window, BLOCK_HEADS)
    if heads_due == 0:
        return
    t = tl.load(position_ptr)
    has_few = t - watermark < few
    _recover_tiles(
        inputs_ptr, w_ptr, b_ptr, k_ptr, v_ptr, due & has_few, watermark, t, B, H, R, T,
        D, HEAD_DIM, BLOCK_HEADS, FEW_I, FEW_R, FEW_D, SPLIT, FEW_STAGES,
    )  # fmt: skip
    _recover_tiles(
        inputs_ptr, w_ptr, b_ptr, k_ptr, v_ptr, due & (has_few == 0), watermark, t, B, H, R, T,
        D, HEAD_DIM, BLOCK_HEADS, MANY_I, MANY_R, MANY_D, SPLIT, MANY_STAGES,
    )  # fmt: skip


def check_recover(inputs, w, b, selected, watermark, position, k_cache, v_cache, window) -> None:
    """ValueError or TypeError for what `recover_kv` refuses; w may be packed."""
    if inputs.dim() != 3:
        raise ValueError(f"inputs must be [B, R, D], got {tuple(inputs.shape)}")
    B, R, D = inputs.shape
    if not 1 <= window < R:
        raise ValueError(f"window must lie in 1..{R - 1}, below the length of the ring, got {window}")
    if len(w.shape) != 4 or w.shape[1] != 3 or w.shape[3] != D:
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
    if not all(x.is_contiguous() for x in (*floats, selected, watermark) if torch.is_tensor(x)):
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
    window: int,
) -> None:
    """Store keys and values of the heads that miss some and are selected or overdue; see the module docstring.

    Args:
        window: W, positions that a head may miss before it is recovered though not selected.

    Raises:
        ValueError: wrong shapes, a window beyond the ring, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    check_recover(inputs, w, b, selected, watermark, position, k_cache, v_cache, window)
    B, R, D = inputs.shape
    H, _, head_dim, _ = w.shape
    few, many = _TILES[w.element_size()]
    _recover_kv_kernel[(_PROGRAMS,)](
        inputs, w, b, selected.view(torch.uint8), watermark, position, k_cache, v_cache,
        B, H, R, k_cache.shape[2], window, _FEW // B,
        D=D,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(H),
        **dict(zip(("FEW_I", "FEW_R", "FEW_D", "FEW_STAGES"), few, strict=True)),
        **dict(zip(("MANY_I", "MANY_R", "MANY_D", "MANY_STAGES"), many, strict=True)),
        SPLIT=_SPLIT,
        num_warps=_SPLIT,
        **launch_options(),
    )  # fmt: skip
