"""Residual add and layer norm of one token a row: hidden += y + bias; x = norm(hidden).

The layer norm is that of Ba et al. 2016 (arXiv:1607.06450), computed in fp32 and rounded once, as torch does.

Shapes (B tokens, D hidden size):
    y       [B, D]  what a projection adds, dtype of hidden or fp32; or [S, B, D], in parts; or None
    bias    [D]     of that projection, or None
    hidden  [B, D]  the residual stream, updated in place; contiguous, as all others
    norm    weight and bias [D], epsilon; None: x is hidden itself
    ring    [B, R, D], or None: x is also stored at slot position % R, for the heads that this step leaves out
    moves   position [1] int32 and position_ids [B] int64, both raised by one; or None. For the last launch of a step:
            nothing that runs beside it may read them
    lets_in the next launch may begin at once, to load weights: this one has a program a token
    x       [B, D]  dtype of hidden
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.tiles import await_inputs, launch_options, let_in


class Norm(NamedTuple):
    """A layer norm's weight and bias, each [D] or None, and its epsilon."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    @classmethod
    def of(cls, module: torch.nn.LayerNorm | None) -> "Norm | None":
        """The tensors of a module; None for None."""
        return None if module is None else cls(module.weight, module.bias, module.eps)


def add_norm_ref(
    y: torch.Tensor | None,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
    norm: Norm | None,
    ring: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    moves: tuple[torch.Tensor, torch.Tensor] | None = None,
    lets_in: bool = False,
) -> torch.Tensor:
    """Plain torch twin of `add_norm`: same arguments, same result, rounded where torch rounds."""
    if y is not None:
        hidden += y if y.dim() == 2 else y.sum(0)
    if bias is not None:
        hidden += bias
    if norm is None:
        x = hidden
    else:
        x = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias, norm.eps)
    if ring is not None:
        ring.index_copy_(1, (position % ring.shape[1]).long(), x[:, None])
    for moved in moves or ():
        moved += 1
    return x


@triton.jit
def load_vector(ptr, offs_d, mask_d, EXISTS: tl.constexpr):
    """A parameter [BLOCK], zero beyond D, of which a launch may load before it waits; 0.0 where there is none."""
    if EXISTS:
        return tl.load(ptr + offs_d, mask=mask_d, other=0.0)
    else:
        return 0.0


@triton.jit
def store_norm(
    h, offs_d, mask_d, row, weight, bias, x_ptr, ring_ptr, position_ptr, eps, R,
    D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RING: tl.constexpr,
):  # fmt: skip
    """Normalise h [BLOCK] fp32, the whole of row `row` (int64) and zero beyond D, and store it."""
    # Loads before the sums, behind which they would have to wait.
    if HAS_RING:
        slot = row * R + tl.load(position_ptr) % R
    centred = tl.where(mask_d, h - tl.sum(h, axis=0) / D, 0.0)
    x = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / D + eps)
    if HAS_WEIGHT:
        x = x * weight.to(tl.float32)
    if HAS_BIAS:
        x = x + bias.to(tl.float32)
    x = x.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * D + offs_d, x, mask=mask_d)
    if HAS_RING:
        tl.store(ring_ptr + slot * D + offs_d, x, mask=mask_d)


@triton.jit(do_not_specialize=["B", "R"])
def _add_norm_kernel(
    y_ptr, y_bias_ptr, hidden_ptr, weight_ptr, bias_ptr, x_ptr, ring_ptr, position_ptr, moved_ptr, moved_ids_ptr,
    eps, B, R,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_Y_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RING: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LETS_IN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    weight = load_vector(weight_ptr, offs_d, mask_d, HAS_WEIGHT)
    bias = load_vector(bias_ptr, offs_d, mask_d, HAS_BIAS)
    y_bias = load_vector(y_bias_ptr, offs_d, mask_d, HAS_Y_BIAS)
    await_inputs(EARLY)
    if LETS_IN:
        let_in(EARLY)
    h = tl.load(hidden_ptr + row * D + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        place = part * B.to(tl.int64) + row
        h += tl.load(y_ptr + place * D + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if HAS_Y_BIAS:
        h += y_bias.to(tl.float32)
    if PARTS > 0 or HAS_Y_BIAS:
        rounded = h.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * D + offs_d, rounded, mask=mask_d)
        h = rounded.to(tl.float32)
    store_norm(
        h, offs_d, mask_d, row, weight, bias, x_ptr, ring_ptr, position_ptr, eps, R,
        D, HAS_WEIGHT, HAS_BIAS, HAS_RING,
    )  # fmt: skip
    if MOVES:
        tl.store(moved_ids_ptr + row, tl.load(moved_ids_ptr + row) + 1)
        if row == 0:
            tl.store(moved_ptr, tl.load(moved_ptr) + 1)


def check_add_norm(bias, hidden, norm, ring, position, y=None) -> None:
    """ValueError or TypeError for arguments that do not fit the module docstring."""
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be [B, D], got {tuple(hidden.shape)}")
    B, D = hidden.shape
    if y is not None and (y.dim() not in (2, 3) or y.shape[-2:] != hidden.shape):
        raise ValueError(f"y must be {[B, D]} like hidden, or [S, {B}, {D}], got {tuple(y.shape)}")
    vectors = [t for t in (bias, *(norm or ())[:2]) if t is not None]
    if any(t.shape != (D,) for t in vectors):
        raise ValueError(f"bias and norm must be [{D}], as wide as hidden, got {[tuple(t.shape) for t in vectors]}")
    if ring is not None:
        if ring.dim() != 3 or ring.shape[::2] != (B, D):
            raise ValueError(f"ring must be [{B}, R, {D}], got {tuple(ring.shape)}")
        if position is None or position.shape != (1,) or position.dtype != torch.int32:
            raise ValueError("a ring takes position, [1] int32")
    tensors = [t for t in (hidden, ring, *vectors) if t is not None]
    if len({t.dtype for t in tensors}) != 1:
        raise TypeError(f"hidden, biases, norm and ring must share one dtype, got {[t.dtype for t in tensors]}")
    if y is not None and y.dtype not in (hidden.dtype, torch.float32):
        raise TypeError(f"y must be {hidden.dtype} as hidden, or fp32; got {y.dtype}")
    if not all(t.is_contiguous() for t in (*tensors, *(() if y is None else (y,)))):
        raise ValueError("hidden, y, biases, norm and ring must be contiguous")


def add_norm(
    y: torch.Tensor | None,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
    norm: Norm | None,
    ring: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    moves: tuple[torch.Tensor, torch.Tensor] | None = None,
    lets_in: bool = False,
) -> torch.Tensor:
    """Add to `hidden` in place and return its norm x [B, D]; shapes are in the module docstring.

    Raises:
        ValueError: wrong shapes, or tensors that are not contiguous.
        TypeError: mixed dtypes.
    """
    check_add_norm(bias, hidden, norm, ring, position, y)
    B, D = hidden.shape
    if moves is not None and [(t.shape, t.dtype) for t in moves] != [((1,), torch.int32), ((B,), torch.int64)]:
        raise ValueError(f"moves must be [1] int32 and [{B}] int64, got {[(tuple(t.shape), t.dtype) for t in moves]}")
    if moves is not None and lets_in:
        raise ValueError("what moves the position lets nothing in, which might read it: drop moves or lets_in")
    if norm is None:
        return add_norm_ref(y, bias, hidden, norm, ring, position, moves)
    x = torch.empty(B, D, device=hidden.device, dtype=hidden.dtype)
    block_d = triton.next_power_of_2(D)
    _add_norm_kernel[(B,)](
        y, bias, hidden, norm.weight, norm.bias, x, ring, position, *(moves or (None, None)),
        norm.eps, B, 0 if ring is None else ring.shape[1],
        D=D,
        PARTS=0 if y is None else y.numel() // hidden.numel(),
        HAS_Y_BIAS=bias is not None,
        HAS_WEIGHT=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        HAS_RING=ring is not None,
        MOVES=moves is not None,
        BLOCK_D=block_d,
        LETS_IN=lets_in,
        num_warps=max(1, min(16, block_d // 512)),
        **launch_options(),
    )  # fmt: skip
    return x
