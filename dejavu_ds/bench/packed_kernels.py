"""The kernel benchmark's rows over 4-bit weights: our kernels with the kept rows and with all, and bitsandbytes'."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dejavu_ds.bench.layer import STD, Case, Layer, calls_on
from dejavu_ds.kernels.packed_ops import packed_ops_for
from dejavu_ds.quantize import QuantizeConfig, bitsandbytes_functional, pack


def packed_cases(layer: Layer, quantize: str) -> Iterator[Case]:
    """fc1, fc2 and both: the kept neurons and all by our kernels, and all by bitsandbytes.

    quantize: "nf4" or "fp4", in blocks of 64 with scales in fp32.
    """
    D, N, K = layer.shape.hidden, layer.neurons, layer.kept_neurons
    config = QuantizeConfig(quantize)
    config.check_rows(D)
    row_bytes = D // 2 + 4 * D // config.blocksize
    R = layer.buffers(2 * N * row_bytes, K * row_bytes)
    inputs = layer.random(layer.batch, D), layer.random(layer.batch, N).abs() + 1
    bias = torch.full((N,), 8 * STD * math.sqrt(D), dtype=layer.dtype, device=layer.device)
    yield from _ours(layer, config, inputs, bias, R, {"sparse": K, "dense": N}, row_bytes)
    yield from _bitsandbytes(layer, config, inputs, bias, R, N * row_bytes)


def _ours(
    layer: Layer,
    config: QuantizeConfig,
    inputs: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor,
    R: int,
    kept: dict[str, int],
    row_bytes: int,
) -> Iterator[Case]:
    ops, (x, h), D, N = packed_ops_for(layer.device), inputs, layer.shape.hidden, layer.neurons
    up, down = ([pack(layer.random(N, D, std=STD), config) for _ in range(R)] for _ in range(2))

    def fc1(sets: list, i: int) -> torch.Tensor:
        return ops.gather_up_proj(x, up[i], bias, *sets[i], relu=True)

    def fc2(sets: list, i: int, h: torch.Tensor = h) -> torch.Tensor:
        return ops.gather_down_proj(h, down[i], *sets[i], skip_zeros=True)

    for system, rows in kept.items():
        sets = [layer.choose(N, rows) for _ in range(R)]
        yield from _mlp(system, R, partial(fc1, sets), partial(fc2, sets), rows * row_bytes, config.type)


def _bitsandbytes(
    layer: Layer,
    config: QuantizeConfig,
    inputs: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor,
    R: int,
    matrix: int,
) -> Iterator[Case]:
    from bitsandbytes import matmul_4bit

    functional, (x, h) = bitsandbytes_functional(), inputs

    def quantized(rows: int, columns: int) -> list[tuple]:
        weights = (layer.random(rows, columns, std=STD) for _ in range(R))
        return [functional.quantize_4bit(w, blocksize=config.blocksize, quant_type=config.type) for w in weights]

    up, down = quantized(layer.neurons, layer.shape.hidden), quantized(layer.shape.hidden, layer.neurons)

    def fc1(i: int) -> torch.Tensor:
        packed, state = up[i]
        return torch.relu(matmul_4bit(x, packed.t(), quant_state=state, bias=bias))

    def fc2(i: int, h: torch.Tensor = h) -> torch.Tensor:
        packed, state = down[i]
        return matmul_4bit(h, packed.t(), quant_state=state)

    yield from _mlp("bitsandbytes", R, fc1, fc2, matrix, config.type, "matmul_4bit")


def _mlp(
    system: str,
    R: int,
    fc1: Callable[[int], torch.Tensor],
    fc2: Callable[..., torch.Tensor],
    matrix: int,
    quantize: str,
    variant: str | None = None,
) -> Iterator[Case]:
    yield Case("gather_up_proj", system, calls_on(R, fc1), matrix, variant, quantize)
    yield Case("gather_down_proj", system, calls_on(R, fc2), matrix, variant, quantize)
    yield Case("sparse_mlp", system, calls_on(R, lambda i: fc2(i, fc1(i))), 2 * matrix, variant, quantize)
