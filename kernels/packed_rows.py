"""Decoding a tile of a packed weight into memory, to the bit as the twin: for prefill, whose products are cuBLAS's.

A tile is rows and whole blocks of columns of a `PackedWeight`; see `packed_weight` for the layout. An element is its
code's value, looked up in memory, times its scale in fp32, rounded once.
"""

import torch
import triton
import triton.language as tl

from dejavu_ds.kernels.nibbles import decode_bytes, offset_of, scales
from dejavu_ds.kernels.packed_weight import PackedWeight, decode
from dejavu_ds.kernels.tiles import await_inputs, launch_options

# Bytes that a program decodes.
_BLOCK = 2048


def packed_tile_ref(w: PackedWeight, rows: slice, columns: slice) -> torch.Tensor:
    """Plain torch twin of `packed_tile`: same arguments, same bits."""
    packed, absmax = w.gather(rows)
    absmax = absmax[:, columns.start // w.blocksize : columns.stop // w.blocksize]
    return decode(packed[:, columns.start // 2 : columns.stop // 2], absmax, w.code, w.dtype)


@triton.jit(do_not_specialize=["first_row", "first_byte", "bytes_"])
def _packed_tile_kernel(
    w_ptr, absmax_ptr, absmax_code_ptr, absmax_scale_ptr, absmax_offset_ptr, code_ptr, out_ptr,
    first_row, first_byte, bytes_,
    D: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    offset = offset_of(absmax_offset_ptr)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < bytes_
    row = first_row + tl.program_id(0).to(tl.int64)
    byte = first_byte + offs
    p = tl.load(w_ptr.to(tl.pointer_type(tl.uint8)) + row * (D // 2) + byte, mask=mask, other=0)
    first = row * (D // BLOCKSIZE)
    absmax = scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, byte // (BLOCKSIZE // 2), first, mask)
    high, low = decode_bytes(p, (code_ptr,), tl.float32, "")
    values = tl.reshape(tl.join(high * absmax, low * absmax), (2 * BLOCK,))
    offs = 2 * tl.program_id(1) * BLOCK + tl.arange(0, 2 * BLOCK)
    out_ptrs = out_ptr + tl.program_id(0).to(tl.int64) * 2 * bytes_ + offs
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=offs < 2 * bytes_)


def packed_tile(w: PackedWeight, rows: slice, columns: slice) -> torch.Tensor:
    """Elements [n, m] of n rows and m columns, slices with their ends, the columns whole blocks."""
    n, m = rows.stop - rows.start, columns.stop - columns.start
    out = torch.empty(n, m, device=w.device, dtype=w.dtype)
    if out.numel():
        _packed_tile_kernel[(n, triton.cdiv(m, 2 * _BLOCK))](
            *w.pointers(), w.code, out,
            rows.start, columns.start // 2, m // 2,
            D=w.shape[-1],
            BLOCKSIZE=w.blocksize,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,  # bitsandbytes rounds a nested scale before it adds the offset
            **launch_options(),
        )  # fmt: skip
    return out
