"""Packing a block's weights in 4 bits, by bitsandbytes' own quantiser.

What is packed is the gather layout, after sharding and transposing: there a head or a neuron is whole rows, and a row
is whole blocks. Every element has the bits that `bitsandbytes.functional.dequantize_4bit` gives.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dejavu_ds.kernels.packed_weight import NESTED_BLOCK, NestedAbsmax, PackedWeight

TYPES = ("nf4", "fp4")
BLOCKSIZES = (64, 128)

# Elements quantised at a time: on a CPU bitsandbytes needs some 20 bytes for each of them on the way.
_TILE_ELEMENTS = 2**22


@dataclass(frozen=True)
class QuantizeConfig:
    """How the weights of the blocks are packed; embeddings, norms, biases, the head and, unless asked for, predictors
    stay as they are.

    Args:
        type: "nf4" (codes at the quantiles of a normal distribution) or "fp4" (a 4-bit float).
        blocksize: weights that share a scale, 64 or 128; the hidden size must be a multiple of it.
        nested: scales in 8 bits, which saves about 0.37 bits a weight at blocksize 64, half of that at 128.
        predictors: pack the predictors too, their first layers like the blocks, the second ones in 8 bits.

    Raises:
        ValueError, TypeError: a value that bitsandbytes or the kernels do not have, with the value.
    """

    type: str = "nf4"
    blocksize: int = 64
    nested: bool = False
    predictors: bool = False

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"quantize must be one of {', '.join(TYPES)}, or None for 16 bit; got {self.type!r}")
        if not isinstance(self.blocksize, int) or self.blocksize not in BLOCKSIZES:
            raise ValueError(f"blocksize must be {' or '.join(map(str, BLOCKSIZES))}, got {self.blocksize!r}")
        for name in ("nested", "predictors"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | QuantizeConfig | None") -> "QuantizeConfig | None":
        """What `init_inference` takes: a type, the fields as a dict, a config, or None for weights as they are."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping):
            raise TypeError(f"quantize must be 'nf4', 'fp4', a dict or a QuantizeConfig, got {value!r}")
        unknown = set(value) - set(cls.__dataclass_fields__)
        if unknown:
            fields = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"quantize has no {sorted(map(str, unknown))}; its fields are {fields}")
        return cls(**value)

    def check_rows(self, width: int) -> None:
        """ValueError unless rows of `width` weights, the hidden size, are whole blocks."""
        if width % self.blocksize:
            fitting = [size for size in BLOCKSIZES if width % size == 0]
            way_out = f"use blocksize {fitting[0]}" if fitting else "run this model without quantize"
            raise ValueError(f"rows of {width} weights are not whole blocks of {self.blocksize}: {way_out}")


def bitsandbytes_functional() -> ModuleType:
    """`bitsandbytes.functional`; ValueError where it is not installed or cannot be imported."""
    # It warns of a fused product that it could not download. We do not use it, and need nobody to install it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional as functional
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "bitsandbytes":
            raise ValueError("quantize needs bitsandbytes: pip install bitsandbytes, or leave quantize out") from error
        raise
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"quantize needs bitsandbytes, whose import fails here: {_first_line(error)}") from error
    return functional


def check_bitsandbytes(config: QuantizeConfig, device: torch.device | str, dtype: torch.dtype) -> None:
    """ValueError where bitsandbytes is missing or cannot quantise on this device: one block is tried."""
    bitsandbytes_functional()
    try:
        pack(torch.ones(1, config.blocksize, device=device, dtype=dtype), config).packed.cpu()
    except Exception as error:  # a library without this device fails in its own ways
        raise ValueError(
            f"bitsandbytes cannot quantise {dtype} to {config.type} on {device} ({_first_line(error)}); "
            "`python -m bitsandbytes` says more, or leave quantize out"
        ) from error


def pack(weight: torch.Tensor, config: QuantizeConfig) -> PackedWeight:
    """Pack a weight [..., D] of 16 or 32 bits on its device; it may be a view, such as a transposed one.

    Rows are quantised a few at a time, so that little more memory is needed than the result takes.

    Raises:
        ValueError: D is not a multiple of the blocksize.
    """
    functional = bitsandbytes_functional()
    *leading, D = weight.shape
    config.check_rows(D)
    rows = weight.detach().flatten(0, -2)
    bytes_, blocks = D // 2, D // config.blocksize
    packed = torch.empty(len(rows), bytes_, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(len(rows), blocks, dtype=torch.float32, device=weight.device)
    step = max(1, _TILE_ELEMENTS // D)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        data, state = functional.quantize_4bit(
            rows[part].contiguous(), blocksize=config.blocksize, quant_type=config.type
        )
        packed[part], absmax[part] = data.view(-1, bytes_), state.absmax.view(-1, blocks)
    nested = None
    if config.nested:
        absmax, nested = _nest(absmax, functional)
    code = functional.get_4bit_type(config.type, device=weight.device)
    packed, absmax = packed.view(*leading, bytes_), absmax.view(*leading, blocks)
    return PackedWeight(packed, absmax, code, weight.dtype, nested)


def _nest(absmax: torch.Tensor, functional: ModuleType) -> tuple[torch.Tensor, NestedAbsmax]:
    """Scales in 8 bits, as `quantize_4bit(compress_statistics=True)` has them, over the scales of all rows."""
    if not absmax.numel():
        # A rank without neurons: there is no mean, and bitsandbytes' CUDA library ends the process over nothing to do.
        state = functional.quantize_blockwise(absmax.new_zeros(1), blocksize=NESTED_BLOCK)[1]
        return absmax.to(torch.uint8), NestedAbsmax(state.code, state.absmax[:0], absmax.new_zeros(()))
    offset = absmax.flatten().mean()
    codes, state = functional.quantize_blockwise(absmax.flatten() - offset, blocksize=NESTED_BLOCK)
    return codes.view(absmax.shape), NestedAbsmax(state.code, state.absmax, offset)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
