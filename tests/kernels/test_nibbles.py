"""The assembly of the 4-bit lookup, run by a small interpreter of the few PTX instructions that it has."""

import re
import struct

import numpy as np
import pytest
import torch

from dejavu_ds.kernels import nibbles, packed_products
from dejavu_ds.kernels.nibbles import pairs_table, permute_lookup
from dejavu_ds.quantize import bitsandbytes_functional

MASK = 0xFFFFFFFF
# Where the table is in shared memory: anywhere, in whole entries.
BASE = 3 * 128


@pytest.fixture(params=["nf4", "fp4"])
def code(request) -> tuple[float, ...]:
    return tuple(bitsandbytes_functional().get_4bit_type(request.param, device="cpu").tolist())


def halves(bits: int) -> np.ndarray:
    return np.array([bits], dtype=np.uint32).view(np.float16)


def bits_of(pair: np.ndarray) -> int:
    return int(pair.astype(np.float16).view(np.uint32)[0])


def permute(a: int, b: int, selector: int) -> int:
    source, out = struct.pack("<II", a, b), 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source[nibble & 7]
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * i
    return out


def fused(a, b, c):
    """a * b + c of fp16 rounded once: exact in fp64."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


def dot_of_bytes(a: int, b: int, c: int) -> int:
    return sum((a >> i & 255) * (b >> i & 255) for i in range(0, 32, 8)) + c


OPERATIONS = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "dp4a.u32.u32": dot_of_bytes,
    "sub.rn.f16x2": lambda a, b: bits_of(halves(a) - halves(b)),
    "add.rn.f16x2": lambda a, b: bits_of(halves(a) + halves(b)),
    "mul.rn.f16x2": lambda a, b: bits_of(halves(a) * halves(b)),
    "fma.rn.f16x2": lambda a, b, c: bits_of(fused(halves(a), halves(b), halves(c))),
    "cvt.f32.f16": lambda a: float(np.array([a], dtype=np.uint16).view(np.float16)[0]),
    "cvt.rn.f16.f32": lambda a: int(np.array([a], dtype=np.float16).view(np.uint16)[0]),
    "add.f32": lambda a, b: a + b,
    "fma.rn.f32": lambda a, b, c: a * b + c,
    "setp.eq.f32": lambda a, b: a == b,
}


def run(asm: str, outputs: int, *inputs, shared: dict[int, int] | None = None) -> list:
    """What the outputs $0 .. hold at the end; inputs $outputs .. are bit patterns, or numbers for those in fp32.

    shared  registers of 32 bits in shared memory, by address
    """
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    registers |= {"0f00000000": 0.0, "nibble_pairs": BASE}

    def value(name: str):
        return registers[name] if name in registers else int(name, 0)

    for statement in asm.strip()[1:-1].split(";"):
        statement = statement.replace("DONE:", "").strip()
        if not statement or statement.startswith(".reg"):
            continue
        if statement == "@p bra DONE":
            if registers["p"]:
                break
            continue
        name, _, rest = statement.partition(" ")
        target, *sources = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        if name == "ld.shared.b32":
            registers[target] = shared[value(sources[0].strip("[]"))]
            continue
        if name == "st.shared.v4.b32":
            for i, source in enumerate(re.findall(r"\$\d+", sources[0])):
                shared[value(target.strip("[]")) + 4 * i] = value(source)
            continue
        if target.startswith("{"):  # into its parts
            parts, bits = re.findall(r"\w+", target), int(name[-2:]) // 2
            for i, part in enumerate(parts):
                registers[part] = value(sources[0]) >> bits * i & ((1 << bits) - 1)
        elif sources[0].startswith("{"):  # from two of 16 bits
            low, high = re.findall(r"\w+", sources[0])
            registers[target] = value(low) | value(high) << 16
        else:
            registers[target] = OPERATIONS[name](*map(value, sources))
    return [registers[f"${i}"] for i in range(outputs)]


def word(codes: list[int]) -> int:
    """16 codes as they are packed: the first of two in the high nibble of a byte."""
    return int.from_bytes(bytes(a << 4 | b for a, b in zip(codes[::2], codes[1::2], strict=True)), "little")


def table(lookup) -> list[int]:
    return [value & MASK for value in lookup.table[::8].tolist()]


@pytest.fixture
def shared(code) -> dict[int, int]:
    """Shared memory after all of the stores that fill the table."""
    memory, pairs = {}, pairs_table(code, "cpu").tolist()
    for i in range(2048):
        run(nibbles._FILL_ASM.value, 1, 16 * i, pairs[i // 8] & MASK, shared=memory)
    return memory


def random_codes(seed: int) -> list[int]:
    return torch.randint(0, 16, (16,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_table_is_the_code_in_fp16_by_bytes(code):
    pairs = pairs_table(code, "cpu")
    assert pairs.dtype == torch.int32 and pairs.shape == (256,)
    for byte, pair in enumerate(pairs.tolist()):
        # The first element is the high nibble, and in the low half.
        assert halves(pair & MASK).tolist() == np.float16([code[byte >> 4], code[byte & 15]]).tolist()


def test_every_lane_reads_its_own_bank(code, shared):
    """An entry is 128 bytes, all the same; a lane's copies, wherever its bytes lead it, are in one bank of 4 bytes."""
    pairs = [pair & MASK for pair in pairs_table(code, "cpu").tolist()]
    assert shared == {BASE + 4 * i: pairs[i // 32] for i in range(32 * 256)}
    reads = []

    class Watched(dict):
        def __getitem__(self, address):
            reads.append(address)
            return super().__getitem__(address)

    for lane in range(32):
        run(nibbles._PAIRS_ASM.value, 8, word(random_codes(lane)), lane_of(lane), shared=Watched(shared))
        assert {address % 128 for address in reads[8 * lane :]} == {4 * lane}


def lane_of(lane: int) -> int:
    return run(nibbles._LANE_ASM.value.replace("%laneid", str(lane)), 1, 0)[0]


@pytest.mark.parametrize("seed", range(8))
def test_pairs_are_the_code_in_fp16(seed, code, shared):
    codes = random_codes(seed)
    pairs = run(nibbles._PAIRS_ASM.value, 8, word(codes), lane_of(4 * seed), shared=shared)
    assert np.concatenate([halves(pair) for pair in pairs]).tolist() == np.float16([code[c] for c in codes]).tolist()


def test_bytes_are_high_and_low_nibbles(code):
    lookup = permute_lookup(code, "cpu")
    for high, low in ((a, b) for a in range(16) for b in range(16)):
        codes = [high, low, low, high, 15 - high, low, high, 15 - low]
        packed = word(codes + [0] * 8) & MASK
        # Triton gives an argument of 32 bits once for each of the four bytes.
        outs = run(lookup.asm, 4, packed, *(value for value in table(lookup) for _ in range(4)))
        values = np.concatenate([halves(out) for out in outs]).tolist()
        assert values == np.float16([code[c] for c in codes[::2] + codes[1::2]]).tolist()


@pytest.mark.parametrize("asm, half", [
    (nibbles._ADD_ASM, nibbles._ADD_HALF_ASM), (nibbles._ADD_ALWAYS_ASM, nibbles._ADD_HALF_ALWAYS_ASM)
], ids=["branching", "always"])  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_a_word_added(seed, asm, half, code, shared):
    codes, lane = random_codes(seed), lane_of(seed)
    before, factor = [float(i) for i in range(16)], 0.375
    expected = [b + factor * float(np.float16(code[c])) for b, c in zip(before, codes, strict=True)]
    assert run(asm.value, 16, word(codes), factor, lane, *before, shared=shared) == expected
    assert run(asm.value, 16, word(codes), 0.0, lane, *before, shared=shared) == before
    pairs = [bits_of(np.float16(before[i : i + 2])) for i in range(0, 16, 2)]
    after = run(half.value, 8, word(codes), factor, lane, *pairs, shared=shared)
    assert np.concatenate([halves(pair) for pair in after]).tolist() == np.float16(expected).tolist()
    assert run(half.value, 8, word(codes), 0.0, lane, *pairs, shared=shared) == pairs


@pytest.mark.parametrize("asm, words, sums", [
    (nibbles._ADD_ASM, 1, 16), (nibbles._ADD_HALF_ASM, 1, 8), (nibbles._ADD_TWO_HALF_ASM, 2, 16)
], ids=["fp32", "half", "two in half"])  # fmt: skip
def test_nothing_is_looked_up_for_a_factor_of_zero(asm, words, sums):
    """There is no table here to look it up in."""
    before = (
        [float(i) for i in range(16)] if asm is nibbles._ADD_ASM else [bits_of(np.float16([i, i])) for i in range(sums)]
    )
    asked = [word(random_codes(seed)) for seed in range(words)]
    assert run(asm.value, sums, *asked, 0.0, 0, *before) == before


@pytest.mark.parametrize("one, two", [
    (nibbles._ADD_HALF_ASM, nibbles._ADD_TWO_HALF_ASM), (nibbles._ADD_HALF_ALWAYS_ASM, nibbles._ADD_TWO_HALF_ALWAYS_ASM)
], ids=["branching", "always"])  # fmt: skip
def test_two_words_added(one, two, code, shared):
    """As one after the other."""
    words, lane = [word(random_codes(seed)) for seed in (1, 2)], lane_of(5)
    before = [[bits_of(np.float16([i, k])) for i in range(8)] for k in (1, 2)]
    for factor in (0.375, 0.0):
        singly = [
            run(one.value, 8, w, factor, lane, *sums, shared=shared) for w, sums in zip(words, before, strict=True)
        ]
        both = run(two.value, 16, *words, factor, lane, *before[0], *before[1], shared=shared)
        assert both == singly[0] + singly[1]


def test_a_word_times_x():
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((2, 16)).astype(np.float16)
    pairs = [[bits_of(v[i : i + 2]) for i in range(0, 16, 2)] for v in (w, x)]
    (y,) = run(packed_products._DOT_ASM.value, 1, *pairs[0], *pairs[1])
    exact, terms = np.float64(w) @ np.float64(x), np.abs(np.float64(w)) @ np.abs(np.float64(x))
    assert 0 < abs(y - exact) <= 5 * 2**-11 * terms  # each product passes 5 roundings
    assert run(nibbles._SPLIT_ASM.value, 2, pairs[0][3]) == [float(w[6]), float(w[7])]


@pytest.mark.parametrize("changed", [{3: 0.5}, {12: 1e-4}], ids=["both signs in one half", "too small"])
def test_rejects_other_tables(changed):
    code = [-1.0 + i / 8 for i in range(8)] + [(i + 1) / 8 for i in range(8)]
    permute_lookup(tuple(code), "cpu")
    for place, value in changed.items():
        code[place] = value
    with pytest.raises(ValueError, match="no permutes for the table"):
        permute_lookup(tuple(code), "cpu")
