"""How the kernels over 4-bit rows decode nibbles and scales.

A packed row is read in words of 8 bytes, 16 elements. Compiled, multiply-adds look up a byte, two elements, in a table
of 256 pairs of fp16 in shared memory: a shift, a mask and a load. The table holds every pair 32 times over, once for
each bank of the memory, so that the lanes of a warp never wait for one another. That is 32 KB, which a program writes
before it waits for earlier launches, and which pays where programs are few and take many rows each. Triton has no
shared memory to declare, so the table is declared and read by inline assembly. That Triton takes for a function of its
arguments; they hence include the lane's place in the table, which is asked for only after the barrier that ends the
writing.

Tensor cores take less time per element than their operands take to fetch, and their tiles want the shared memory for
themselves. For them bytes are decoded by byte permutes (PTX `prmt`), four nibbles at a time: a permute selects among 8
bytes by three bits of a selector nibble; the fourth asks for the sign of the byte, eight times over. So the table is
cut by the fourth bit of the code into two halves of 8 magnitudes in fp16, and each magnitude into its two bytes. The
nibbles as they are select from the one half, with their fourth bits turned over from the other. For a nibble of the
other half the high byte comes out as zero, since magnitudes have no sign, and the low byte as 0 or 255: at most
255 * 2 ** -24. The difference of the two is the value, in one subtraction that rounds that rest away.

Inline assembly does not run in Triton's interpreter, and fp16 is too short for fp32 activations: `lookup_of` then gives
a plain lookup in the table in memory, which is exact. Everything else is one code for both.
"""

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from dejavu_ds.kernels.packed_weight import NESTED_BLOCK, PackedWeight
from dejavu_ds.kernels.tiles import _INTERPRETED

WORD = 16
"""Elements in a word of 8 bytes, what a thread loads of a row at a time."""
_WORD = tl.constexpr(WORD)
_NESTED_BLOCK = tl.constexpr(NESTED_BLOCK)


class Lookup(NamedTuple):
    """How a kernel decodes nibbles.

    asm    of tensor cores, 4 bytes to their high nibbles and their low ones, in fp16; SHARED: words by the table in
           shared memory; "": by the one in memory
    table  what it is made of: [32] int32, the registers that permutes select from, each 8 times; [256] int32, pairs
           of fp16 by byte; fp32 [16], the code
    """

    asm: str
    table: torch.Tensor


SHARED = "shared"
_SHARED = tl.constexpr(SHARED)


def lookup_of(w: PackedWeight, dtype: torch.dtype, dot: bool) -> Lookup:
    """The lookup for a weight, activations of `dtype` and a kernel with tensor cores or without.

    The one place where it is chosen.
    """
    if _INTERPRETED or dtype.itemsize != 2:
        return Lookup("", w.code)
    if dot:
        return permute_lookup(w.code_values, w.device)
    return Lookup(SHARED, pairs_table(w.code_values, w.device))


@cache
def pairs_table(code: tuple[float, ...], device: torch.device | str) -> torch.Tensor:
    """[256] int32, for each byte its two elements in fp16, the high nibble's in the low half: that is the first one."""
    values = torch.tensor(code, dtype=torch.float16)
    byte = torch.arange(256)
    return torch.stack((values[byte >> 4], values[byte & 15]), dim=1).view(torch.int32).flatten().to(device)


@cache
def permute_lookup(code: tuple[float, ...], device: torch.device | str) -> Lookup:
    """Byte permutes for a table of 16 values.

    Raises:
        ValueError: a table that they cannot look up: values of both signs within its first or its last 8, or some
            other than 0 below 2 ** -8, where what the other half leaves behind would be seen.
    """
    if any(min(part) < 0 < max(part) for part in (code[:8], code[8:])) or any(0 < abs(v) < 2**-8 for v in code):
        raise ValueError(f"no permutes for the table {list(code)}: each half of one sign, values of at least 2 ** -8")
    # A permute takes one immediate operand. The other would be moved into a register over and over again, also out of a
    # uniform register, were it known to be the same for all threads. So each loads it, from places that may differ.
    planes = [_planes(half) for half in (code[:8], code[8:])]
    first = torch.tensor([low for half in planes for low, _ in half], dtype=torch.int64).to(torch.int32)
    second = tuple(high for half in planes for _, high in half)
    return Lookup(_bytes_asm(second, min(code[:8]) < 0), first.repeat_interleave(8).to(device))


# Of two bytes' nibbles, where low and high bytes are that make up a pair of fp16: elements 0 and 2, and 1 and 3. The
# element of a high nibble comes first.
_BY_NIBBLE = ("0x7351", "0x6240")


def _bytes_asm(second: tuple[int, ...], negative: bool) -> str:
    return "\n".join(
        [
            "{ .reg .b32 s, c, la, ha, lb, hb, a, b;",
            "mov.b32 s, $4; xor.b32 c, $4, 0x88888888;",
            *_two_bytes(second, negative, range(5, 21, 4), ("$0", "$2")),
            "shr.u32 s, s, 16; shr.u32 c, c, 16;",
            *_two_bytes(second, negative, range(5, 21, 4), ("$1", "$3")),
            "}",
        ]
    )


def _two_bytes(second: tuple[int, ...], negative: bool, table: range, outs: Sequence[str]) -> list[str]:
    """The 4 nibbles at the low end of s, and in c those with the fourth bits turned over, into two registers."""
    lookups = zip(("la", "ha", "lb", "hb"), table, second, ("s", "s", "c", "c"), strict=True)
    difference = "b, a" if negative else "a, b"
    return [
        *(f"prmt.b32 {out}, ${first}, {high}, {sel};" for out, first, high, sel in lookups),
        *(
            f"prmt.b32 a, la, ha, {pair}; prmt.b32 b, lb, hb, {pair}; sub.rn.f16x2 {out}, {difference};"
            for pair, out in zip(_BY_NIBBLE, outs, strict=True)
        ),
    ]


def _planes(half: tuple[float, ...]) -> list[tuple[int, int]]:
    """Low and high bytes of 8 magnitudes in fp16, each as the two registers that a permute selects from."""
    halves = [struct.pack("<e", abs(value)) for value in half]
    return [
        tuple(int.from_bytes(bytes(v[byte] for v in halves[i : i + 4]), "little") for i in (0, 4)) for byte in (0, 1)
    ]


# The table, 32 lanes times 4 bytes for each byte. Named by all of the assembly below, declared once in a kernel.
_DECLARE_ASM = tl.constexpr(".shared .align 128 .b8 nibble_pairs[32768]; mov.b32 $0, 0;")
_FILL_ASM = tl.constexpr(
    "{ .reg .b32 a; mov.u32 a, nibble_pairs; add.u32 a, a, $1; st.shared.v4.b32 [a], {$2, $2, $2, $2}; mov.b32 $0, 0; }"
)
_LANE_ASM = tl.constexpr("{ .reg .b32 l, t; mov.u32 l, %laneid; mov.u32 t, nibble_pairs; mad.lo.u32 $0, l, 4, t; }")
_FENCE_ASM = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")
_REGISTERS = "{ .reg .b32 w0, w1, a;"


def _look_up(word: str, lane: str, outs: Sequence[str]) -> str:
    """16 elements of a register of 64 bits into 8 of pairs.

    A byte times 128, the bytes of an entry, and the lane's place in the first one: a dot product of bytes (PTX `dp4a`).
    """
    lines = [f"mov.b64 {{w0, w1}}, {word};"]
    for i, out in enumerate(outs):
        lines.append(f"dp4a.u32.u32 a, w{i // 4}, {0x80 << 8 * (i % 4):#x}, {lane}; ld.shared.b32 {out}, [a];")
    return "\n".join(lines) + "\n"


_OUTS, _VALUES = [f"${i}" for i in range(8)], [f"v{i}" for i in range(8)]
_PAIRS_ASM = tl.constexpr(f"{_REGISTERS} {_look_up('$8', '$9', _OUTS)}}}")


def _adding(registers: str, sums: int, first: int, factor: str, lines: Callable[[list[str]], str], skip: bool) -> str:
    """Assembly whose outputs are so many sums: the arguments from `first` on, and what `lines` adds to operands.

    skip  nothing is done for a factor of 0. Words then wait for one another, and fewer registers are in use at a time
    """
    outs, before = ([f"${start + i}" for i in range(sums)] for start in (0, first))
    copies, end = "", "}"
    if skip:
        copies = "".join(f"mov.b32 {out}, {old};\n" for out, old in zip(outs, before, strict=True))
        copies += f"setp.eq.f32 p, {factor}, 0f00000000; @p bra DONE;\n"
        before, end = outs, "DONE: }"
    return f"{_REGISTERS} {registers} .reg .pred p;\n{copies}{lines(before)}{end}"


def _add_asm(skip: bool) -> str:
    """16 sums; arguments the word, the factor, the lane, 16 sums before."""

    def lines(before: list[str]) -> str:
        return _look_up("$16", "$18", _VALUES) + "".join(
            f"mov.b32 {{e, f}}, v{i}; cvt.f32.f16 g, e; fma.rn.f32 ${2 * i}, g, $17, {before[2 * i]};"
            f"cvt.f32.f16 g, f; fma.rn.f32 ${2 * i + 1}, g, $17, {before[2 * i + 1]};\n"
            for i in range(8)
        )

    return _adding(".reg .b32 v<8>; .reg .b16 e, f; .reg .f32 g;", 16, 19, "$17", lines, skip)


def _add_half_asm(words: int, skip: bool) -> str:
    """8 pairs of sums in fp16 for each of 1 or 2 words; arguments the words, the factor, the lane, the pairs before.

    Of two words 16 lookups do not wait for one another.
    """
    pairs = 8 * words
    factor, lane = f"${pairs + words}", f"${pairs + words + 1}"

    def lines(before: list[str]) -> str:
        values = [f"v{i}" for i in range(pairs)]
        looked_up = "".join(_look_up(f"${pairs + w}", lane, values[8 * w : 8 * w + 8]) for w in range(words))
        scale = f"cvt.rn.f16.f32 e, {factor}; mov.b32 u, {{e, e}};\n"
        return scale + looked_up + "".join(f"fma.rn.f16x2 ${i}, v{i}, u, {before[i]};\n" for i in range(pairs))

    registers = f".reg .b32 v<{pairs}>, u; .reg .b16 e;"
    return _adding(registers, pairs, pairs + words + 2, factor, lines, skip)


_ADD_ASM, _ADD_ALWAYS_ASM = (tl.constexpr(_add_asm(skip)) for skip in (True, False))
_ADD_HALF_ASM, _ADD_HALF_ALWAYS_ASM = (tl.constexpr(_add_half_asm(1, skip)) for skip in (True, False))
_ADD_TWO_HALF_ASM, _ADD_TWO_HALF_ALWAYS_ASM = (tl.constexpr(_add_half_asm(2, skip)) for skip in (True, False))
_SPLIT_ASM = tl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }")


@triton.jit
def fill_table(table_ptr, ASM: tl.constexpr):
    """Write the table in shared memory, once in a kernel and outside of loops and branches, before `shared_table`.

    It depends on nothing that a launch writes, so it needs not wait for earlier ones.
    """
    if ASM == _SHARED:
        tl.inline_asm_elementwise(
            _DECLARE_ASM, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
        # 16 bytes a store: four lanes' copies of a pair. The addresses of a thread differ by constants.
        THREADS: tl.constexpr = num_threads()
        thread = tl.arange(0, THREADS)
        for i in tl.static_range(2048 // THREADS):
            pairs = tl.load(table_ptr + thread // 8 + i * (THREADS // 8))
            tl.inline_asm_elementwise(
                _FILL_ASM, "=r,r,r", [thread * 16 + i * (THREADS * 16), pairs], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.debug_barrier()


@triton.jit
def word_table(table_ptr, like, ASM: tl.constexpr):
    """What `decode` and its like take as `table`, in the layout of the words, that of the int32 tensor `like`."""
    if ASM == "":
        return table_ptr
    else:
        # Not pure: so it stays behind the barrier, and with it all lookups, which depend on it.
        return tl.inline_asm_elementwise(_LANE_ASM, "=r,r", [like], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def pass_no_loads(table, ASM: tl.constexpr):
    """The table from `word_table`; what reads it stays behind loads that were asked for before.

    Else loads would be put off to where their registers are free, after the products. A warp's barrier, which no access
    to memory passes, is all that it takes.
    """
    if ASM == "":
        return table
    else:
        return tl.inline_asm_elementwise(_FENCE_ASM, "=r,r", [table], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def byte_table(table_ptr, offs, ASM: tl.constexpr):
    """What `decode_bytes` takes as `table`, once a program; offs: of the bytes, in their layout."""
    if ASM == "":
        return (table_ptr, table_ptr, table_ptr, table_ptr)
    else:
        ptrs = table_ptr + offs % 8
        return (tl.load(ptrs), tl.load(ptrs + 8), tl.load(ptrs + 16), tl.load(ptrs + 24))


@triton.jit
def decode_pairs(q, table):
    """16 elements of each int64 of q as 8 int32, two fp16 in each."""
    return tl.inline_asm_elementwise(
        _PAIRS_ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r", [q, table],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def split_pairs(pairs):
    """First and second fp16 of each int32, in fp32."""
    return tl.inline_asm_elementwise(
        _SPLIT_ASM, "=f,=f,r", [pairs], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def add_word(acc, q, s, table, SKIP: tl.constexpr):
    """The 16 tensors acc, fp32, and s times the elements of q, a tensor of words.

    SKIP  threads of one warp branch over what is zero for all of them, such as a row that nobody wants
    """
    return tl.inline_asm_elementwise(
        _ADD_ASM if SKIP else _ADD_ALWAYS_ASM, "=&f" + ",=&f" * 15 + ",l,f,r" + ",f" * 16,
        [q, s, table,
         acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
         acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32,
               tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def add_word_half(acc, q, s, table, SKIP: tl.constexpr):
    """The same of 8 tensors of pairs in fp16, in half precision."""
    return tl.inline_asm_elementwise(
        _ADD_HALF_ASM if SKIP else _ADD_HALF_ALWAYS_ASM, "=&r" + ",=&r" * 7 + ",l,f,r" + ",r" * 8,
        [q, s, table, acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def add_two_words_half(acc, q, s, table, SKIP: tl.constexpr):
    """The same of two words, a tuple, and 16 tensors of pairs."""
    return tl.inline_asm_elementwise(
        _ADD_TWO_HALF_ASM if SKIP else _ADD_TWO_HALF_ALWAYS_ASM, "=&r" + ",=&r" * 15 + ",l,l,f,r" + ",r" * 16,
        [q[0], q[1], s, table,
         acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
         acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32,
               tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def decode(q, table, ASM: tl.constexpr):
    """16 elements of each int64 of q without their scale, as a tuple of 16 fp32 tensors."""
    out = ()
    if ASM == "":
        for i in tl.static_range(_WORD):
            # The first of a byte's two elements is its high nibble.
            out = out + (tl.load(table + ((q >> (4 * (i ^ 1))) & 15)),)
    else:
        pairs = decode_pairs(q, table)
        for i in tl.static_range(_WORD // 2):
            out = out + split_pairs(pairs[i])
    return out


@triton.jit
def decode_bytes(p, table, dtype: tl.constexpr, ASM: tl.constexpr):
    """The elements of high and of low nibbles of bytes p without their scale, in `dtype`."""
    if ASM == "":
        high = tl.load(table[0] + (p >> 4))
        low = tl.load(table[0] + (p & 15))
    else:
        # An argument of 32 bits comes as 4 registers where 4 bytes come as one.
        high, low = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r" + ",r" * 16, [p, table[0], table[1], table[2], table[3]],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return high.to(dtype), low.to(dtype)


@triton.jit
def load_masked(ptrs, mask):
    """What is there, zeros where a mask, if there is one, says so."""
    if mask is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def scales(absmax_ptr, absmax_code_ptr, absmax_scale_ptr, offset, column, first, mask):
    """Scales of blocks column + first of a weight, fp32; the pointers of nested ones are None where they are in fp32.

    column  what is the same for many rows; it is added first, as it can be once for all of them
    """
    absmax = load_masked(absmax_ptr + column + first, mask)
    if absmax_code_ptr is not None:
        scale = load_masked(absmax_scale_ptr + (column + first) // _NESTED_BLOCK, mask)
        absmax = tl.load(absmax_code_ptr + absmax.to(tl.int32)) * scale + offset
        if mask is not None:
            absmax = tl.where(mask, absmax, 0.0)
    return absmax


@triton.jit
def offset_of(absmax_offset_ptr):
    """What is added to nested scales."""
    if absmax_offset_ptr is None:
        return 0.0
    else:
        return tl.load(absmax_offset_ptr)
