"""First launch of a step: hidden = token embedding + position embedding, x = norm(hidden).

Shapes (B tokens, V vocabulary, P positions, D hidden size):
    tokens     [B]     int64, 0 <= tokens < V; values are not checked (it would sync)
    positions  [B]     int64, 0 <= positions + offset < P; likewise
    token_table, position_table  [V, D], [P, D]  contiguous
    norm, ring, position         as in `add_norm`
    hidden, x  [B, D]  dtype of the tables
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.add_norm import Norm, add_norm_ref, check_add_norm, load_vector, store_norm
from dejavu_ds.kernels.tiles import await_inputs, launch_options


def embed_norm_ref(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    position_table: torch.Tensor,
    offset: int,
    norm: Norm,
    ring: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch twin of `embed_norm`: same arguments, same result."""
    hidden = token_table[tokens] + position_table[positions + offset]
    return hidden, add_norm_ref(None, None, hidden, norm, ring, position)


@triton.jit(do_not_specialize=["R", "offset"])
def _embed_norm_kernel(
    tokens_ptr, positions_ptr, token_table_ptr, position_table_ptr, hidden_ptr,
    weight_ptr, bias_ptr, x_ptr, ring_ptr, position_ptr,
    offset, eps, R,
    D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RING: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    weight = load_vector(weight_ptr, offs_d, mask_d, HAS_WEIGHT)
    bias = load_vector(bias_ptr, offs_d, mask_d, HAS_BIAS)
    await_inputs(EARLY)
    token, place = tl.load(tokens_ptr + row), tl.load(positions_ptr + row) + offset
    h = tl.load(token_table_ptr + token * D + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    h += tl.load(position_table_ptr + place * D + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    rounded = h.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + row * D + offs_d, rounded, mask=mask_d)
    store_norm(
        rounded.to(tl.float32), offs_d, mask_d, row, weight, bias, x_ptr, ring_ptr, position_ptr, eps, R,
        D, HAS_WEIGHT, HAS_BIAS, HAS_RING,
    )  # fmt: skip


def _check(tokens, positions, token_table, position_table) -> None:
    if token_table.dim() != 2 or position_table.dim() != 2 or token_table.shape[1] != position_table.shape[1]:
        raise ValueError(
            f"the tables must be [V, D] and [P, D], got {tuple(token_table.shape)} and {tuple(position_table.shape)}"
        )
    if tokens.dim() != 1 or tokens.shape != positions.shape:
        raise ValueError(f"tokens and positions must be [B], got {tuple(tokens.shape)} and {tuple(positions.shape)}")
    if not tokens.dtype == positions.dtype == torch.int64:
        raise TypeError(f"tokens and positions must be int64, got {tokens.dtype} and {positions.dtype}")
    if token_table.dtype != position_table.dtype:
        raise TypeError(f"the tables must share one dtype, got {token_table.dtype} and {position_table.dtype}")
    if not all(t.is_contiguous() for t in (tokens, positions, token_table, position_table)):
        raise ValueError("tokens, positions and the tables must be contiguous")


def embed_norm(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    position_table: torch.Tensor,
    offset: int,
    norm: Norm,
    ring: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden and its norm x, both [B, D]; shapes are in the module docstring.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: wrong or mixed dtypes.
    """
    _check(tokens, positions, token_table, position_table)
    B, D = tokens.shape[0], token_table.shape[1]
    hidden = torch.empty(B, D, device=token_table.device, dtype=token_table.dtype)
    x = torch.empty(B, D, device=token_table.device, dtype=token_table.dtype)
    check_add_norm(None, hidden, norm, ring, position)
    block_d = triton.next_power_of_2(D)
    _embed_norm_kernel[(B,)](
        tokens, positions, token_table, position_table, hidden, norm.weight, norm.bias, x, ring, position,
        offset, norm.eps, 0 if ring is None else ring.shape[1],
        D=D,
        HAS_WEIGHT=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        HAS_RING=ring is not None,
        BLOCK_D=block_d,
        num_warps=max(1, min(16, block_d // 512)),
        **launch_options(),
    )  # fmt: skip
    return hidden, x
