"""A weight in 4 bits, as bitsandbytes packs it: where it lies and how it is decoded.

NF4 and FP4 are the data types of QLoRA (Dettmers et al. 2023, arXiv:2305.14314). A weight [..., D] is cut along D into
blocks; an element is its code's value times the largest magnitude of its block, a product in fp32 that is rounded once
to the dtype of the activations:

    w[..., d] = code[nibble d of packed] * absmax[..., d // blocksize]

    packed  [..., D / 2]          uint8; element 2 i is the high nibble of byte i, element 2 i + 1 the low one
    absmax  [..., D / blocksize]  fp32
    code    [16]                  fp32

Nested, absmax is itself in 8 bits (double quantisation), over blocks of 256 that run on from row to row. With `flat`
the index of a block in the whole weight, and the product rounded to fp32 before the sum:

    absmax[flat] = absmax_code[q[flat]] * absmax_scale[flat // 256] + absmax_offset

    absmax         [..., D / blocksize]  uint8, q
    absmax_code    [256]                 fp32
    absmax_scale   [ceil(blocks / 256)]  fp32
    absmax_offset  []                    fp32

D is a whole number of blocks. So the bytes and scales of a row stand alone, and any set of rows can be gathered.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

NESTED_BLOCK = 256
"""Scales that share one of their own."""

# Elements that the twins decode together: on a CPU few enough for a core's cache, elsewhere enough to fill the device.
_TILE_ELEMENTS = {"cpu": 2**18}
_TILE_ELEMENTS_ELSEWHERE = 2**26


class NestedAbsmax(NamedTuple):
    """What 8-bit scales are decoded with; see the module docstring."""

    code: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


class PackedWeight(nn.Module):
    """A weight [..., D] in 4 bits; everything is in buffers, laid out as the module docstring says.

    Moving the module to another dtype changes the dtype it decodes to and nothing that is stored.

    Args:
        packed, absmax, code, nested: as in the module docstring; nested None for scales in fp32.
        dtype: of the activations, which rows are decoded to.

    Attributes:
        shape: of the weight, [..., D]; device, dtype: as a tensor's.
        blocksize: elements that share a scale.
        code_values: what is in `code`, known to the host.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        absmax: torch.Tensor,
        code: torch.Tensor,
        dtype: torch.dtype,
        nested: NestedAbsmax | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.shape = torch.Size((*packed.shape[:-1], 2 * packed.shape[-1]))
        self.blocksize = self.shape[-1] // absmax.shape[-1]
        self.code_values = tuple(code.tolist())
        self.register_buffer("packed", packed)
        self.register_buffer("absmax", absmax)
        self.register_buffer("code", code)
        self.register_buffer("absmax_code", nested and nested.code)
        self.register_buffer("absmax_scale", nested and nested.scale)
        self.register_buffer("absmax_offset", nested and nested.offset)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nested(self) -> NestedAbsmax | None:
        """What the scales are decoded with, if they are in 8 bits."""
        if self.absmax_code is None:
            return None
        return NestedAbsmax(self.absmax_code, self.absmax_scale, self.absmax_offset)

    @property
    def nbytes(self) -> int:
        """Bytes that grow with the weight: codes and scales, without the tables that decode them."""
        parts = (self.packed, self.absmax, self.absmax_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """What a kernel reads: codes in words of 8 bytes, scales, and what decodes them, None thrice in fp32."""
        return (self.packed.view(torch.int64), self.absmax, *(self.nested or (None, None, None)))

    def dequantize(self) -> torch.Tensor:
        """The whole weight, [..., D]."""
        return self.rows(slice(None)).view(self.shape)

    def rows(self, rows: torch.Tensor | slice) -> torch.Tensor:
        """Rows [n, D] of the weight, its leading dimensions taken as one.

        rows  [n] int32 or int64, any order, or a slice
        """
        packed, absmax = self.gather(rows)
        return decode(packed, absmax, self.code, self.dtype)

    def gather(self, rows: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes [n, D / 2] and scales [n, D / blocksize] in fp32 of such rows, for `decode`."""
        packed, absmax = self.packed.flatten(0, -2)[rows], self.absmax.flatten(0, -2)
        if self.nested is None:
            return packed, absmax[rows]
        flat = torch.arange(absmax.numel(), device=self.device).view(absmax.shape)[rows]
        code, scale, offset = self.nested
        return packed, code[absmax[rows].int()] * scale[flat // NESTED_BLOCK] + offset

    def row_tiles(self, count: int) -> Iterator[slice]:
        """`count` rows in parts to be decoded one at a time."""
        return _tiles(count, max(1, self._tile_elements() // self.shape[-1]))

    def column_tiles(self, count: int) -> Iterator[slice]:
        """The columns in parts, whole blocks, to be decoded one at a time for `count` rows."""
        blocks = self._tile_elements() // (max(count, 1) * self.blocksize)
        return _tiles(self.shape[-1], max(1, blocks) * self.blocksize)

    def _tile_elements(self) -> int:
        return _TILE_ELEMENTS.get(self.device.type, _TILE_ELEMENTS_ELSEWHERE)

    def _apply(self, fn, recurse: bool = True):
        """Codes and scales keep their dtypes, whatever the activations are converted to."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer) if buffer.dtype == torch.uint8 else _moved(buffer, fn)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return self

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, blocksize={self.blocksize}, nested={self.nested is not None}, dtype={self.dtype}"


def decode(packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements [n, m] of bytes [n, m / 2] with scales [n, m / blocksize]: a whole number of blocks of any rows."""
    n, m = packed.shape[0], 2 * packed.shape[1]
    byte = torch.arange(256, device=code.device)
    pairs = torch.stack((code[byte >> 4], code[byte & 15]), dim=1)
    values = nn.functional.embedding(packed.int(), pairs)  # [n, m / 2, 2]
    blocks = absmax.shape[1]
    return values.view(n, blocks, m // blocks).mul_(absmax[..., None]).view(n, m).to(dtype)


def _moved(buffer: torch.Tensor, fn) -> torch.Tensor:
    """Where `fn` puts it, in its own dtype and to the bit: through its bytes, which no conversion touches."""
    return fn(buffer.contiguous().view(-1).view(torch.uint8)).view(buffer.dtype).view(buffer.shape)


def _tiles(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def rows_of(idx: torch.Tensor, group: int) -> torch.Tensor:
    """Rows [K * group] of units [K] that are `group` consecutive rows each, in the units' order."""
    return (idx[:, None] * group + torch.arange(group, device=idx.device, dtype=idx.dtype)).flatten()
