"""Search for the fastest block sizes of the projections, for `kernels/tuned.json`.

Every candidate runs as a step would run it: on buffers that overflow the L2 cache, in a CUDA graph. What the search
varies has no influence on results beyond the order of sums.
"""

import itertools
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from dejavu_ds.bench.layer import STD, Layer
from dejavu_ds.bench.timing import time_rotated
from dejavu_ds.kernels.add_norm import Norm, add_norm
from dejavu_ds.kernels.configs import (
    PACKED,
    SUMMED_PARTS,
    WHOLE_ROWS,
    Config,
    most_programs,
    most_registers,
    summed,
    token_block,
)
from dejavu_ds.kernels.gather_down_proj import gather_down_proj, strips_of
from dejavu_ds.kernels.gather_qkv import gather_qkv
from dejavu_ds.kernels.gather_up_proj import gather_up_proj
from dejavu_ds.kernels.nibbles import WORD
from dejavu_ds.kernels.packed_down_proj import packed_down_proj
from dejavu_ds.kernels.packed_qkv import packed_qkv
from dejavu_ds.kernels.packed_up_proj import packed_up_proj
from dejavu_ds.kernels.packed_weight import PackedWeight
from dejavu_ds.quantize import QuantizeConfig, pack
from dejavu_ds.resume import replace_file

# Of nf4 in blocks of 64 with scales in fp32, a weight.
_NF4_BYTES = 0.5625


def candidates(kernel: str, B: int, D: int) -> Iterator[Config]:
    """Configurations worth trying: tiles that fill registers and threads, none that D does not divide into."""
    block_b, dot = token_block(B)
    if kernel in PACKED:
        yield from _packed_candidates(kernel, block_b, dot, D)
    elif dot and kernel in WHOLE_ROWS:
        for n, d, stages in itertools.product((16, 32, 64), (64, 128, 256), (3, 4)):
            if D % d == 0:
                yield Config(block_b, n, d, True, stages, programs=1024)
    elif dot:
        for n, d, stages, programs in itertools.product((64, 128, 256), (64, 128), (2, 3, 4), (264, 528)):
            if D % d == 0 and n * d <= 16384:
                yield Config(block_b, n, d, True, stages, 4, programs)
    elif kernel in WHOLE_ROWS:
        for n, d, warps, programs in itertools.product((1, 2, 4), (1024, 2048), (4, 8), (1056, 2112, 4096)):
            per_thread = n * d / (32 * warps)
            # The loop over D is unrolled.
            if D % d == 0 and d >= 8 * 32 * min(warps, 4) and 8 <= per_thread <= 64 and D // d <= 24:
                yield Config(block_b, n, d, False, 1, warps, programs)
    else:
        # Rows that a thread has on their way at a time, and programs for as many warps as registers allow with them.
        for d, (warps, steps) in itertools.product((32, 64, 128), ((4, 4), (8, 2), (8, 4), (16, 2))):
            n = steps * 32 * warps * 16 // (2 * d)
            tried = {2112 // warps, 3168 // warps, 4224 // warps, SUMMED_PARTS * D // d}
            for programs in sorted(tried) if D % d == 0 else ():
                yield Config(block_b, n, d, False, 1, warps, programs)


def _packed_candidates(kernel: str, block_b: int, dot: bool, D: int) -> Iterator[Config]:
    """The same for 4-bit rows: a word a thread, and as many words at once as registers hold for all tokens."""
    if dot and kernel in WHOLE_ROWS:
        for n, stages, warps in itertools.product((16, 32, 64), (2, 3, 4), (2, 4)):
            yield Config(block_b, n, 64, True, stages, warps, 1024)
    elif dot:
        for n, stages, programs in itertools.product((32, 64, 128), (2, 3, 4), (264, 528)):
            yield Config(block_b, n, 64, True, stages, 4, programs)
    elif kernel in WHOLE_ROWS:
        rows = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 3))
        numbers = (264, 396, 528) if block_b == 1 else (132, 198, 264, 528)
        for (n, away), warps, programs in itertools.product(rows, (2, 4, 8), numbers):
            d = 32 * warps * WORD
            tiles = -(-D // d)
            config = Config(block_b, n, d, False, away, warps, programs, True)
            # Registers for words of x, and for those of the row that is multiplied and of others, with scales. A last
            # tile that is not full costs its time all the same.
            needed = tiles * (8 * block_b + 3 * (away + 1)) + 24
            beside = kernel == "packed_qkv"
            fits = needed <= most_registers(config, beside) and programs == most_programs(config, beside)
            if tiles * d <= 1.34 * D and fits and n * block_b <= 4 and away <= n:
                yield config
    else:
        wide = 2 if block_b == 1 else 1
        tiles = ((64, 4, 4), (128, 4, 2), (128, 4, 4), (128, 8, 2), (128, 8, 4), (256, 4, 4), (256, 8, 2), (256, 8, 4))
        # Every token has its own sums.
        for d, warps, steps in sorted({(d, warps, max(1, steps // block_b)) for d, warps, steps in tiles}):
            n = steps * 32 * warps * WORD * wide // d
            for away in (1, 3):
                for programs in sorted({264, 396, SUMMED_PARTS * D // d}) if D % d == 0 else ():
                    yield Config(block_b, n, d, False, away, warps, programs, block_b == 1, wide)


def calls(
    kernel: str, layer: Layer, every: bool = False, buffers: int | None = None
) -> list[Callable[[Config], torch.Tensor]]:
    """The kernel on each of several buffers, for a configuration to be given; as many as overflow the cache.

    every: read all units in place of those that the layer keeps.
    """
    D, B = layer.shape.hidden, layer.batch
    heads = kernel in ("gather_qkv", "out_proj", "packed_qkv", "packed_out_proj")
    units, kept = (layer.heads, layer.kept_heads) if heads else (layer.neurons, layer.kept_neurons)
    kept = units if every else kept
    qkv = kernel in ("gather_qkv", "packed_qkv")
    group = (3 * layer.shape.head_dim if qkv else layer.shape.head_dim) if heads else 1
    w = _NF4_BYTES if kernel in PACKED else layer.dtype.itemsize
    R = buffers or layer.buffers(int(units * group * D * w), int(kept * group * D * w))
    shape = (units, 3, layer.shape.head_dim, D) if qkv else (units * group, D)
    weights = [_random_weight(layer, kernel in PACKED, *shape) for _ in range(R)]
    sets = [layer.choose(units, kept) for _ in range(R)]
    x = layer.random(B, D)
    caches = [layer.random(B, layer.heads, 1, layer.shape.head_dim) for _ in range(2)]
    # As in a step, with a bias and a watermark; here no head has missed anything.
    bias = layer.random(layer.heads, 3, layer.shape.head_dim)
    position, watermark = (torch.zeros(n, dtype=torch.int32, device=layer.device) for n in (1, layer.heads))
    # Half of the kept neurons come out of the ReLU as zero.
    h = layer.random(B, units * group) if heads else torch.relu(layer.random(B, units * group))

    def call(i: int, config: Config) -> torch.Tensor:
        if qkv:
            op = packed_qkv if kernel in PACKED else gather_qkv
            return op(x, weights[i], bias, *sets[i], *caches, position, watermark, config=config)
        if kernel in WHOLE_ROWS:
            op = packed_up_proj if kernel in PACKED else gather_up_proj
            return op(x, weights[i], None, *sets[i], relu=True, config=config)
        op = packed_down_proj if kernel in PACKED else gather_down_proj
        return op(h, weights[i], *sets[i], group=group, skip_zeros=not heads, config=config)

    return [lambda config, i=i: call(i, config) for i in range(R)]


def _random_weight(layer: Layer, packed: bool, *shape: int) -> torch.Tensor | PackedWeight:
    weight = layer.random(*shape, std=STD)
    return pack(weight, QuantizeConfig()) if packed else weight


def compile_some(jobs: list[tuple[str, Layer, Config]]) -> None:
    """Fill Triton's cache on disk, in a process of its own."""
    for (kernel, layer), group in itertools.groupby(jobs, key=lambda job: job[:2]):
        (first,) = calls(kernel, layer, buffers=1)
        for _, _, config in group:
            try:
                first(config)
            except triton.OutOfResources:
                continue
        torch.cuda.empty_cache()


def tune(
    layers: list[Layer], kernels: list[str], repeats: int, workers: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The fastest configuration of each kernel for each layer: entries of `tuned.json`, with all times beside."""
    jobs = [(k, layer, c) for layer in layers for k in kernels for c in candidates(k, layer.batch, layer.shape.hidden)]
    say(f"{len(jobs)} candidates, compiled by {workers} processes")
    context = multiprocessing.get_context("spawn")
    parts = [jobs[i::workers] for i in range(workers)]
    processes = [context.Process(target=compile_some, args=(part,)) for part in parts if part]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for alike in _alike(layers):
        for kernel in kernels:
            for entry in _fastest(kernel, alike, repeats):
                say(json.dumps(entry | {"tried": len(entry["tried"])}))
                yield entry


def _alike(layers: list[Layer]) -> list[list[Layer]]:
    """Layers that one configuration has to serve: of one batch and width, which differ in their numbers of units."""
    groups: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.batch, layer.shape.hidden), []).append(layer)
    return list(groups.values())


def _fastest(kernel: str, layers: list[Layer], repeats: int) -> list[dict[str, Any]]:
    """One configuration serves the sparse and the dense step of all layers: the one whose times have the least product.

    Of a down-projection that of all, and that of those that give the result in the parts that GPUs sum.
    """
    times = [_times(kernel, layer, every, repeats) for layer in layers for every in (False, True)]
    fitting = (config for config in times[0] if all(config in other for other in times))
    tried = sorted(fitting, key=lambda c: math.prod(each[c] for each in times))
    found = [_entry(kernel, layers[0], tried, times)]
    if kernel not in WHOLE_ROWS:
        B, D = layers[0].batch, layers[0].shape.hidden
        in_parts = [c for c in tried if c.programs // strips_of(c, B, D) == SUMMED_PARTS]
        if in_parts:
            found.append(_entry(summed(kernel), layers[0], in_parts, times))
    return found


def _entry(name: str, layer: Layer, tried: list[Config], times: list[dict[Config, float]]) -> dict[str, Any]:
    """The best of `tried`, with its times for the first layer, and all times."""
    best = tried[0]
    return {
        "kernel": name,
        "D": layer.shape.hidden,
        "config": best._asdict(),
        "us": round(times[0][best], 2),
        "us_every": round(times[1][best], 2),
        "tried": [[*config, *(round(each[config], 2) for each in times)] for config in tried],
    }


def _times(kernel: str, layer: Layer, every: bool, repeats: int) -> dict[Config, float]:
    """{configuration: microseconds}, of those that fit.

    Of a down-projection with the norm after it, which takes longer the more parts it has to add up.
    """
    on_buffers, times = calls(kernel, layer, every), {}
    hidden, weight = torch.zeros_like(layer.random(layer.batch, layer.shape.hidden)), layer.random(layer.shape.hidden)

    def run(call: Callable[[Config], torch.Tensor], config: Config) -> None:
        y = call(config)
        if kernel not in WHOLE_ROWS:
            add_norm(y, None, hidden, Norm(weight, weight, 1e-5))

    for config in candidates(kernel, layer.batch, layer.shape.hidden):
        hidden.zero_()
        try:
            taken = time_rotated([partial(run, call, config) for call in on_buffers], repeats, layer.device)
        except triton.OutOfResources:
            continue
        times[config] = 1e3 * sorted(taken)[len(taken) // 2]
    return times


def write_tuned(entries: list[dict], device: str, path: Path) -> None:
    """Write `tuned.json`; earlier entries of other shapes stay.

    Raises ValueError for a file that was measured on another device.
    """
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"device": None, "configs": []}
    if old["device"] not in (None, device):
        raise ValueError(f"{path} was measured on {old['device']}, this is {device}: write to another file with --out")
    kept = {(e["kernel"], e["config"]["block_b"], e["D"]): e for e in old["configs"]}
    for entry in entries:
        kept[entry["kernel"], entry["config"]["block_b"], entry["D"]] = {
            k: entry[k] for k in ("kernel", "D", "config", "us", "us_every")
        }
    ordered = [kept[key] for key in sorted(kept)]
    replace_file(path, (json.dumps({"device": device, "configs": ordered}, indent=1) + "\n").encode())
