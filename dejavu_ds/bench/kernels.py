"""The kernel benchmark: the operations of one decoder layer against the dense ones of torch (cuBLAS on a GPU).

Every call reads buffers of its own, together larger than the L2 cache, and all are replayed in one CUDA graph. Kept
neurons are all active, so that fc2 cannot skip rows: bytes read are bytes counted.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dejavu_ds.bench.layer import MAX_BUFFERS, STD, Case, Layer, calls_on
from dejavu_ds.bench.packed_kernels import packed_cases
from dejavu_ds.bench.random_predictors import default_ranks
from dejavu_ds.bench.results import make_row
from dejavu_ds.bench.timing import peak_bytes, reset_peak, spread, time_rotated
from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.ops import ops_for

_WINDOW = 128
# At a density of a half, runs of missed tokens are two long on average.
_MISSED = 2


def kernel_rows(
    layer: Layer, repeats: int, limit: float, progress: Callable[[str], None], quantize: str | None = None
) -> list[dict[str, Any]]:
    """Rows of all operations for one layer; limit in GB/s. With `quantize` those over 4-bit weights as well."""
    rows = []
    every = [mlp_cases, projection_cases, attention_cases, predictor_cases, recover_cases, norm_cases]
    if quantize is not None:
        every.append(partial(packed_cases, quantize=quantize))
    with torch.no_grad():
        for cases in every:
            reset_peak(layer.device)
            for case in cases(layer):
                progress(f"{layer.shape.name}/{layer.tp}, {case.kernel}, {case.system}")
                rows.append(_row(layer, case, spread(time_rotated(case.calls, repeats, layer.device)), limit))
    return rows


def mlp_cases(layer: Layer) -> Iterator[Case]:
    """fc1, fc2 and both, gathered and dense."""
    ops, D, N, K = ops_for(layer.device), layer.shape.hidden, layer.neurons, layer.kept_neurons
    w = layer.dtype.itemsize
    # Rotated by what the sparse call reads; the dense one reads more.
    R = layer.buffers(2 * N * D * w, K * D * w)
    up = [layer.random(N, D, std=STD) for _ in range(R)]
    down = [layer.random(N, D, std=STD) for _ in range(R)]
    sets = [layer.choose(N, K) for _ in range(R)]
    x, h = layer.random(layer.batch, D), layer.random(layer.batch, N).abs() + 1
    bias = torch.full((N,), 8 * STD * math.sqrt(D), dtype=layer.dtype, device=layer.device)

    def gather_up(i: int) -> torch.Tensor:
        return ops.gather_up_proj(x, up[i], bias, *sets[i], relu=True)

    def gather_down(i: int, h: torch.Tensor) -> torch.Tensor:
        return ops.gather_down_proj(h, down[i], *sets[i], skip_zeros=True)

    def dense_up(i: int) -> torch.Tensor:
        return torch.relu(F.linear(x, up[i], bias))

    def dense_down(i: int, h: torch.Tensor) -> torch.Tensor:
        # The same memory, read as the [D, N] matrix that nn.Linear would hold.
        return F.linear(h, down[i].view(D, N))

    for system, rows, fc1, fc2 in (("sparse", K, gather_up, gather_down), ("dense", N, dense_up, dense_down)):
        variant = None if system == "sparse" else "F.linear"
        matrix = rows * D * w
        yield Case("gather_up_proj", system, calls_on(R, fc1), matrix + rows * w, variant)
        yield Case("gather_down_proj", system, calls_on(R, lambda i, fc2=fc2: fc2(i, h)), matrix, variant)
        both = calls_on(R, lambda i, fc1=fc1, fc2=fc2: fc2(i, fc1(i)))
        yield Case("sparse_mlp", system, both, 2 * matrix + rows * w, variant)


def projection_cases(layer: Layer) -> Iterator[Case]:
    """QKV and output projection of the kept heads, gathered and dense."""
    ops, D, H, K = ops_for(layer.device), layer.shape.hidden, layer.heads, layer.kept_heads
    head_dim, w = layer.shape.head_dim, layer.dtype.itemsize
    R = layer.buffers(4 * H * head_dim * D * w, K * head_dim * D * w)
    qkv = [layer.random(H, 3, head_dim, D, std=STD) for _ in range(R)]
    out = [layer.random(H * head_dim, D, std=STD) for _ in range(R)]
    sets = [layer.choose(H, K) for _ in range(R)]
    bias = layer.random(H, 3, head_dim)
    x, o = layer.random(layer.batch, D), layer.random(layer.batch, H * head_dim)

    def kept_out(i: int) -> torch.Tensor:
        return ops.gather_down_proj(o, out[i], *sets[i], group=head_dim)

    matrix = head_dim * D * w
    caches = [layer.random(layer.batch, H, 1, head_dim) for _ in range(2)]
    first = torch.zeros(1, dtype=torch.int32, device=layer.device)
    kept_in = calls_on(R, lambda i: ops.gather_qkv(x, qkv[i], bias, *sets[i], *caches, first))
    dense_in = calls_on(R, lambda i: F.linear(x, qkv[i].flatten(0, 2), bias.flatten()))
    yield Case("gather_qkv", "sparse", kept_in, 3 * K * (matrix + head_dim * w))
    yield Case("gather_qkv", "dense", dense_in, 3 * H * (matrix + head_dim * w), "F.linear")
    yield Case("out_proj", "sparse", calls_on(R, kept_out), K * matrix)
    dense_out = calls_on(R, lambda i: F.linear(o, out[i].view(D, H * head_dim)))
    yield Case("out_proj", "dense", dense_out, H * matrix, "F.linear")


def attention_cases(layer: Layer) -> Iterator[Case]:
    """Attention of one new token: the kept heads by our kernel, all heads by torch."""
    ops, B, H, K = ops_for(layer.device), layer.batch, layer.heads, layer.kept_heads
    head_dim, w, T = layer.shape.head_dim, layer.dtype.itemsize, layer.context
    capacity = T + 64
    R = layer.buffers(2 * B * H * capacity * head_dim * w, 2 * B * K * T * head_dim * w)
    keys, values = ([layer.random(B, H, capacity, head_dim) for _ in range(R)] for _ in range(2))
    sets = [layer.choose(H, K) for _ in range(R)]
    q = layer.random(B, H, head_dim)
    position = torch.full((1,), T - 1, dtype=torch.int32, device=layer.device)
    key_mask = torch.ones(B, capacity, dtype=torch.bool, device=layer.device)
    tickets = layer.tickets()

    def kept(i: int) -> torch.Tensor:
        return ops.decode_attention(
            q, keys[i], values[i], *sets[i], position, key_mask, head_dim**-0.5, tickets=tickets
        )

    def every(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], keys[i][:, :, :T], values[i][:, :, :T])

    yield Case("decode_attention", "sparse", calls_on(R, kept), 2 * B * K * T * head_dim * w)
    every_head = 2 * B * H * T * head_dim * w
    yield Case("decode_attention", "dense", calls_on(R, every), every_head, "scaled_dot_product_attention")


def predictor_cases(layer: Layer) -> Iterator[Case]:
    """A neurons' predictor: its second layer with threshold and list of the kept, against product and top-k."""
    ops, B, N, K = ops_for(layer.device), layer.batch, layer.neurons, layer.kept_neurons
    w, rank = layer.dtype.itemsize, default_ranks(layer.shape)["mlp"]
    R = layer.buffers(N * rank * w, N * rank * w)
    weights = [layer.random(N, rank, std=rank**-0.5) for _ in range(R)]
    z, bias = layer.random(B, rank), layer.random(N)
    thresholds = [float(F.linear(z, weight, bias).float().amax(0).topk(K).values[-1]) for weight in weights]
    live, tickets = torch.ones(B, dtype=torch.bool, device=layer.device), layer.tickets()
    chosen = *layer.choose(N, N), torch.empty(N, dtype=torch.bool, device=layer.device)
    total = torch.zeros(1, dtype=torch.int64, device=layer.device)

    def kept(i: int) -> None:
        ops.predict_select(z, weights[i], bias, thresholds[i], live, *chosen, kept_total=total, tickets=tickets)

    def top(i: int) -> torch.Tensor:
        return F.linear(z, weights[i], bias).amax(0).topk(K, sorted=False).indices

    nbytes = N * (rank + 1) * w
    yield Case("predict_select", "sparse", calls_on(R, kept), nbytes)
    yield Case("predict_select", "dense", calls_on(R, top), nbytes, "F.linear, topk")


def recover_cases(layer: Layer) -> Iterator[Case]:
    """A run of missing keys and values of every kept head, twice what most steps have; dense never misses any."""
    ops, B, H, K = ops_for(layer.device), layer.batch, layer.heads, layer.kept_heads
    D, head_dim, w = layer.shape.hidden, layer.shape.head_dim, layer.dtype.itemsize
    position = layer.context - 1
    R = layer.buffers(3 * H * head_dim * D * w, 2 * K * head_dim * D * w)
    qkv = [layer.random(H, 3, head_dim, D, std=STD) for _ in range(R)]
    bias = layer.random(H, 3, head_dim)
    inputs = layer.random(B, _WINDOW + 1, D)
    keys, values = (layer.random(B, H, layer.context, head_dim) for _ in range(2))
    chosen = torch.zeros(H, dtype=torch.bool, device=layer.device)
    chosen[layer.choose(H, K)[0][:K].long()] = True
    now = torch.full((1,), position, dtype=torch.int32, device=layer.device)
    watermark = torch.full((H,), max(0, position - _MISSED), dtype=torch.int32, device=layer.device)

    def recover(i: int) -> None:
        ops.recover_kv(inputs, qkv[i], bias, chosen, watermark, now, keys, values, window=_WINDOW)

    yield Case("recover_kv", "sparse", calls_on(R, recover), 2 * K * head_dim * (D + 1) * w)


def norm_cases(layer: Layer) -> Iterator[Case]:
    """Residual add, bias and layer norm in one launch, and by torch."""
    ops, B, D, w = ops_for(layer.device), layer.batch, layer.shape.hidden, layer.dtype.itemsize
    module = torch.nn.LayerNorm(D, dtype=layer.dtype, device=layer.device)
    norm, bias, hidden = Norm.of(module), layer.random(D), layer.random(B, D)
    # In the parts that fc2 comes in.
    parts = ops.gather_down_proj(
        layer.random(B, layer.neurons), layer.random(layer.neurons, D), *layer.choose(layer.neurons, 1)
    )
    y = parts.sum(0).to(layer.dtype)

    def separate() -> torch.Tensor:
        return module(hidden.add_(y + bias))

    # Far too small to leave the cache: what counts is the launch.
    nbytes = (2 * B + 3) * D * w + parts.nbytes
    yield Case("add_norm", "sparse", [lambda: ops.add_norm(parts, bias, hidden, norm)] * MAX_BUFFERS, nbytes)
    yield Case("add_norm", "dense", [separate] * MAX_BUFFERS, nbytes, "add, layer_norm")


def _row(layer: Layer, case: Case, figures: dict[str, float], limit: float) -> dict[str, Any]:
    rate = case.nbytes / figures["ms_median"] / 1e6
    sparse = case.system == "sparse"
    return make_row(
        benchmark="kernels",
        shape=layer.shape.name,
        system=case.system,
        tp=layer.tp,
        batch=layer.batch,
        context=layer.context,
        dtype=str(layer.dtype).removeprefix("torch."),
        mlp_density=layer.kept_neurons / layer.neurons if sparse else 1.0,
        head_density=layer.kept_heads / layer.heads if sparse else 1.0,
        **figures,
        gb_per_s=rate,
        share_of_limit=rate / limit,
        peak_bytes=peak_bytes(layer.device),
        quantize=case.quantize,
        kernel=case.kernel,
        variant=case.variant,
        sizes=f"{layer.shape.hidden}x{layer.neurons}",
        read_bytes=case.nbytes,
        buffers=len(case.calls),
        limit_gb_per_s=limit,
    )
