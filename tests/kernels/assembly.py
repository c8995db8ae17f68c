"""The kernels' inline assembly in Triton's interpreter, so that what only a GPU runs is checked without one.

Element i of a tensor is thread i, and all threads take a statement at the same time: races are not seen.
"""

import re

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

U32 = np.uint64(0xFFFFFFFF)
ABSENT = 0x7FC0DEAD
"""What lies in shared memory that nobody has written: a NaN."""


def f32(bits):
    return bits.astype(np.uint32).view(np.float32)


def of_f32(x):
    return np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)


def f16(bits):
    return bits.astype(np.uint16).view(np.float16)


def of_f16(x):
    return np.asarray(x, dtype=np.float16).view(np.uint16).astype(np.uint64)


def pairs(f, *args):
    lo = f(*(f16(a & np.uint64(0xFFFF)).astype(np.float64) for a in args))
    hi = f(*(f16((a >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.float64) for a in args))
    return of_f16(lo) | of_f16(hi) << np.uint64(16)


def s32(bits):
    return bits.astype(np.uint32).view(np.int32)


def dp4a(a, b, c):
    out = c.copy()
    for i in range(0, 32, 8):
        i = np.uint64(i)
        out = out + ((a >> i) & np.uint64(255)) * ((b >> i) & np.uint64(255))
    return out & U32


OPERATIONS = {
    "add.u32": lambda a, b: (a + b) & U32,
    "and.b32": lambda a, b: a & b,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & U32,
    "popc.b32": lambda a: np.array([bin(int(x)).count("1") for x in a], dtype=np.uint64),
    "add.f32": lambda a, b: of_f32(f32(a) + f32(b)),
    "fma.rn.f32": lambda a, b, c: of_f32(
        (f32(a).astype(np.float64) * f32(b).astype(np.float64) + f32(c).astype(np.float64)).astype(np.float32)
    ),
    "cvt.f32.f16": lambda a: of_f32(f16(a).astype(np.float32)),
    "cvt.rn.f16.f32": lambda a: of_f16(f32(a)),
    "fma.rn.f16x2": lambda a, b, c: pairs(lambda x, y, z: x * y + z, a, b, c),
    "dp4a.u32.u32": dp4a,
    "setp.ne.s32": lambda a, b: (s32(a) != s32(b)).astype(np.uint64),
    "setp.eq.f32": lambda a, b: (f32(a) == f32(b)).astype(np.uint64),
    "selp.f32": lambda a, b, p: np.where(p != 0, a, b),
}


class Results:
    """Of an operation with several."""

    def __init__(self, handles: list):
        self.handles = handles

    def get_result(self, i: int):
        return self.handles[i]


class SharedMemory:
    """Of one program: registers of 32 bits by address, and where each name begins and ends."""

    def __init__(self) -> None:
        self.words, self.ranges, self.top = {}, {}, 1024

    def declare(self, name: str, size: int) -> None:
        assert name not in self.ranges, f"{name} is declared twice"
        self.ranges[name] = range(self.top, self.top + size)
        self.top += -(-size // 128) * 128

    def check(self, addresses: np.ndarray, width: int) -> None:
        for address in addresses.tolist():
            inside = any(address in r and address + 4 * width <= r.stop for r in self.ranges.values())
            assert inside and address % (4 * width) == 0, f"no {4 * width} bytes at {address}"


class Threads:
    """Runs assembly for n threads."""

    def __init__(self, memory: SharedMemory, n: int, registers: dict[str, np.ndarray]):
        lane = np.arange(n, dtype=np.uint64) % np.uint64(32)
        self.memory, self.n, self.registers = memory, n, registers
        registers |= {"%laneid": lane, "%lanemask_lt": (np.uint64(1) << lane) - np.uint64(1)}

    def value(self, name: str) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        if name in self.memory.ranges:
            number = self.memory.ranges[name].start
        else:
            number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(self.n, number & 0xFFFFFFFF, dtype=np.uint64)

    def put(self, name: str, new: np.ndarray, where: np.ndarray) -> None:
        self.registers[name] = np.where(where, new, self.registers.get(name, np.zeros_like(new)))

    def run(self, asm: str) -> None:
        for name, size in re.findall(r"\.shared \.align 128 \.b8 (\w+)\[(\d+)\];", asm):
            self.memory.declare(name, int(size))
        asm = re.sub(r"\.shared \.align[^;]*;", "", asm).strip()
        active = np.ones(self.n, dtype=bool)
        for statement in (asm[1:-1] if asm.startswith("{ .reg") else asm).split(";"):
            if "DONE:" in statement:
                active[:] = True
            statement, where = statement.replace("DONE:", "").strip(), active.copy()
            if not statement or statement.startswith(".reg"):
                continue
            if statement.startswith("@"):
                predicate, _, statement = statement[1:].partition(" ")
                where &= self.value(predicate) != 0
                if statement == "bra DONE":
                    active &= ~where
                    continue
            name, _, rest = statement.partition(" ")
            if name == "bar.warp.sync":  # all threads take a statement at the same time
                continue
            self.step(name, *re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest), where=where)

    def step(self, name: str, target: str, *sources: str, where: np.ndarray) -> None:
        if name.startswith("ld.shared"):
            self.access(sources[0], target, where, self.load)
        elif name.startswith("st.shared"):
            self.access(target, sources[0], where, self.store)
        elif name == "vote.sync.ballot.b32":
            yes = (self.value(sources[0]) != 0).reshape(-1, 32)
            bits = (yes * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(1, dtype=np.uint64)
            self.put(target, np.repeat(bits, 32), where)
        elif name == "shfl.sync.bfly.b32":
            others = np.arange(self.n) ^ self.value(sources[1]).astype(int)
            self.put(target, self.value(sources[0])[others], where)
        elif target.startswith("{"):  # into its parts
            parts = re.findall(r"\w+", target)
            bits = int(name[-2:]) // len(parts)
            for i, part in enumerate(parts):
                number = self.value(sources[0]) >> np.uint64(bits * i) & np.uint64((1 << bits) - 1)
                self.put(part, number, where)
        elif sources[0].startswith("{"):  # from two of 16 bits
            low, high = (self.value(part) for part in re.findall(r"\w+", sources[0]))
            self.put(target, low | high << np.uint64(16), where)
        elif name.startswith("mov"):
            self.put(target, self.value(sources[0]), where)
        else:
            self.put(target, OPERATIONS[name](*map(self.value, sources)), where)

    def access(self, place: str, data: str, where: np.ndarray, act) -> None:
        addresses, names = self.value(place.strip("[]")), re.findall(r"[^\s,{}]+", data)
        self.memory.check(addresses[where], len(names))
        for i, name in enumerate(names):
            act(name, addresses + np.uint64(4 * i), where)

    def load(self, name: str, addresses: np.ndarray, where: np.ndarray) -> None:
        words = [self.memory.words.get(address, ABSENT) for address in addresses.tolist()]
        self.put(name, np.array(words, dtype=np.uint64), where)

    def store(self, name: str, addresses: np.ndarray, where: np.ndarray) -> None:
        self.memory.words |= dict(zip(addresses[where].tolist(), self.value(name)[where].tolist(), strict=True))


def _bits(data: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f":
        assert data.dtype == np.float32
        return of_f32(data)
    bits = data.astype(np.int64).view(np.uint64)
    return bits if kind == "l" else bits & U32


def patch(monkeypatch) -> None:
    """Let the interpreter run assembly, in shared memory of each program's own."""
    memory = [SharedMemory()]
    set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx

    def create_inline_asm(self, asm, constraints, values, types, pure, pack):
        assert pack == 1
        outputs, kinds = constraints.count("="), re.sub("[=&]", "", constraints).split(",")
        n, shape = max(v.data.size for v in values), max((v.data.shape for v in values), key=len)
        registers = {
            f"${outputs + i}": _bits(np.broadcast_to(v.data.reshape(-1), (n,)).copy(), kinds[outputs + i])
            for i, v in enumerate(values)
        }
        Threads(memory[0], n, registers).run(str(asm))
        handles = []
        for i, type_ in enumerate(types):
            view = f32 if type_.scalar == tl.float32 else s32
            data = np.ascontiguousarray(view(registers[f"${i}"])).reshape(shape)
            handles.append(interpreter.TensorHandle(data, type_.scalar))
        return Results(handles)

    def next_program(self, *place):
        memory[0] = SharedMemory()
        return set_grid_idx(self, *place)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", next_program)
