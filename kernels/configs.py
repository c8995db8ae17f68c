"""Block sizes of the kernels: a rule for any shape, and what was measured to be faster for some.

A configuration changes the time of a launch and the order in which it adds, nothing else. It follows from the shapes
alone, so that the same call gives the same bits. `tuned.json` is written by `launch/benchmark.py tune`.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from dejavu_ds.kernels.tiles import row_block

# From this many tokens on, multiply-adds cannot keep up with memory and tensor cores are used.
_DOT_FROM = 5
_DOT_TOKENS = 16


class Config(NamedTuple):
    """Of one projection kernel.

    block_b, block_n, block_d  tokens, rows and columns in a tile
    dot       tensor cores, for which block_b and block_n are at least 16
    stages    of the pipeline that loads tiles for them; without them, of 4-bit rows: rows of whole-row kernels, up to
              block_n, or blocks of block_n that are on their way while others are multiplied
    warps     of a program
    programs  gather_up_proj and gather_qkv, whose programs take whole rows: at most so many along the rows.
              gather_down_proj, whose programs take strips of block_d columns: as many shares of the rows as this allows
    half      of 4-bit rows, for activations in fp16: products and short sums in half precision
    wide      packed_down_proj and packed_out_proj: words of a row that a thread adds up, 1 or 2
    listed    down-projections that skip zeros, of one token: a program lists the rows that it wants before it reads any
    """

    block_b: int
    block_n: int
    block_d: int
    dot: bool = False
    stages: int = 1
    warps: int = 4
    programs: int = 528
    half: bool = False
    wide: int = 1
    listed: bool = True


WHOLE_ROWS = ("gather_up_proj", "gather_qkv", "packed_up_proj", "packed_qkv")
"""The kernels whose programs take whole rows."""
PACKED = ("packed_up_proj", "packed_qkv", "packed_down_proj", "packed_out_proj")
"""The kernels over 4-bit rows."""
KERNELS = ("gather_up_proj", "gather_qkv", "gather_down_proj", "out_proj", *PACKED)
"""The kernels that are tuned; out_proj and packed_out_proj are the down-projections of heads, units of many rows."""

TUNED_FILE = Path(__file__).with_name("tuned.json")


def read_tuned(path: Path = TUNED_FILE) -> dict[tuple[str, int, int], Config]:
    """{(kernel, block_b, D): configuration} for 16-bit activations, as measured."""
    entries = json.loads(path.read_text(encoding="utf-8"))["configs"]
    return {(entry["kernel"], entry["config"]["block_b"], entry["D"]): Config(**entry["config"]) for entry in entries}


TUNED = read_tuned()


def token_block(B: int) -> tuple[int, bool]:
    """Tokens in a tile for a batch of B, and whether tensor cores multiply them."""
    return (_DOT_TOKENS, True) if B >= _DOT_FROM else (triton.next_power_of_2(B), False)


SUMMED_PARTS = 2
"""Parts of a down-projection's result that is then summed over GPUs, which takes the longer the more there are."""


def summed(kernel: str) -> str:
    """The name in the table of a down-projection whose result comes in `SUMMED_PARTS`."""
    return f"{kernel}, summed over GPUs"


def config_for(kernel: str, B: int, D: int, dtype: torch.dtype, over_gpus: bool = False) -> Config:
    """Of one of `KERNELS` for B tokens and rows of D elements; over_gpus: the result is then summed over GPUs."""
    block_b, dot = token_block(B)
    name = summed(kernel) if over_gpus else kernel
    tuned = TUNED.get((name, block_b, D)) if dtype.itemsize == 2 else None
    if tuned is not None:
        return tuned
    if kernel in PACKED:
        return _packed_config(kernel, block_b, dot, D, over_gpus)
    if kernel in WHOLE_ROWS:
        if dot:
            return Config(block_b, 16, max(16, row_block(D, 256)), True, stages=4, programs=1024)
        # The fp32 accumulator holds at most 8192 elements, 64 registers a thread of 4 warps.
        return Config(block_b, 2, row_block(D, 1024), programs=4096)
    if dot:
        return Config(block_b, 128, max(16, row_block(D, 64)), True, stages=3)
    # Four rows a thread at a time, and those of the next step, in registers that let three programs share a
    # multiprocessor.
    return Config(block_b, 128, row_block(D, 64), warps=8, programs=396)


def _packed_config(kernel: str, block_b: int, dot: bool, D: int, over_gpus: bool) -> Config:
    """Threads hold words of 16 elements; tensor cores take a block, of 64 elements or 128, at a time.

    Without them every program has a table of 32 KB, so programs are as many as an H200's 132 multiprocessors hold.
    """
    if kernel in WHOLE_ROWS:
        if dot:
            return Config(block_b, 16, 64, True, stages=3, programs=1024)
        block_d = _row_tile(D, max(3, 8 // block_b))
        return Config(block_b, 1, block_d, False, 1, max(1, block_d // (32 * 16)), 528 // block_b, True)
    if dot:
        return Config(block_b, 64, 64, True, stages=3)
    # Short strips, for more programs. Two words of a row share its scale and what is asked about it; with more tokens
    # their sums would not fit into registers. Most words on their way at a time is what counts: 8 a thread, for one
    # token.
    wide = 2 if block_b == 1 else 1
    warps = 8 if over_gpus or block_b > 1 else 4
    block_d = row_block(D, 128 if over_gpus or block_b == 1 else 256)
    rows = 32 * warps * 16 * wide // block_d
    return Config(block_b, max(1, 4 // block_b) * rows, block_d, False, 1, warps, 396, wide=wide)


def _row_tile(D: int, most: int) -> int:
    """Elements that a program loads of a row at once, in full warps; of x a thread's registers hold `most` words."""
    tiles = [d for d in (512, 1024, 2048, 4096, 8192) if d < 2 * D and triton.cdiv(D, d) <= most]
    if not tiles:
        return row_block(D, 512) if D < 512 else 8192
    # Four warps, unless too much of the last tile is beyond the row.
    return min(tiles, key=lambda d: (triton.cdiv(D, d) * d > 1.15 * D, abs(d - 2048)))


def rows_at_once(config: Config, dtype: torch.dtype) -> int:
    """Rows of a strip of block_d columns that the threads of a program load together, each 16 bytes of one."""
    return max(1, 32 * config.warps * 16 // (config.block_d * dtype.itemsize))


def packed_rows_at_once(config: Config) -> int:
    """The same of packed rows, of which a thread loads `wide` times 8 bytes, 16 elements."""
    return max(1, 32 * config.warps * 16 * config.wide // config.block_d)


RECOVERY_WARPS, RECOVERY_REGISTERS = 4, 128
"""Of a program of `packed_recover_kv`, and a thread of it."""
_MULTIPROCESSORS, _REGISTERS = 132, 65536  # of an H200, and of each of them


def most_registers(config: Config, beside_recovery: bool = False) -> int:
    """Registers a thread may have where all programs are to be at work at once on an H200's 132 multiprocessors.

    But no fewer than 128: what does not fit into them would go to memory, which costs more than to wait for a place.
    beside_recovery: with a program of `packed_recover_kv` on each multiprocessor.
    """
    threads = 32 * config.warps * triton.cdiv(config.programs, _MULTIPROCESSORS)
    return max(128, min(255, _registers_left(beside_recovery) // threads // 8 * 8))


def most_programs(config: Config, beside_recovery: bool = False) -> int:
    """Programs of a kernel that walks over rows, no more than can be at work at once with `most_registers`.

    What a late one would do, the others have to wait for.
    """
    of_program = 32 * config.warps * most_registers(config, beside_recovery)
    return min(config.programs, _MULTIPROCESSORS * max(1, _registers_left(beside_recovery) // of_program))


def _registers_left(beside_recovery: bool) -> int:
    """Of a multiprocessor's, with or without a program of recovery on it."""
    return _REGISTERS - (32 * RECOVERY_WARPS * RECOVERY_REGISTERS if beside_recovery else 0)


def tiles_ahead(config: Config, D: int, dtype: torch.dtype) -> int:
    """Tiles of its first rows that a program loads before it waits: as many as 32 registers a thread hold.

    None for tensor cores, which take tiles from shared memory.
    """
    if config.dot:
        return 0
    registers = max(1, config.block_n * config.block_d * dtype.itemsize // (4 * 32 * config.warps))
    return min(triton.cdiv(D, config.block_d), 32 // registers)
