"""The kernel benchmark: the operations of one decoder layer against the dense ones of torch (cuBLAS on a GPU).

Every call reads buffers of its own, together larger than the L2 cache, and all are replayed in one CUDA graph. Kept
neurons are all active, so that fc2 cannot skip rows: bytes read are bytes counted.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dejavu_ds.bench.random_predictors import default_ranks
from dejavu_ds.bench.results import make_row
from dejavu_ds.bench.shapes import Shape
from dejavu_ds.bench.timing import peak_bytes, reset_peak, spread, time_rotated
from dejavu_ds.bench.traffic import check_memory, free_bytes
from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.ops import ops_for

_STD = 0.02
_MAX_BUFFERS = 16
# The L2 cache of an H200, in bytes; more than a CPU's share of its last one, as a rule.
_CACHE = 50 * 2**20
_WINDOW = 128
# At a density of a half, runs of missed tokens are two long on average.
_MISSED = 2


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer on one rank, and what is kept of it.

    heads, neurons  of this rank; kept_heads, kept_neurons of these
    """

    shape: Shape
    tp: int
    batch: int
    context: int
    mlp_density: float
    head_density: float
    dtype: torch.dtype
    device: torch.device

    @property
    def heads(self) -> int:
        return self.shape.heads // self.tp

    @property
    def neurons(self) -> int:
        return self.shape.ffn // self.tp

    @property
    def kept_heads(self) -> int:
        return max(1, round(self.head_density * self.heads))

    @property
    def kept_neurons(self) -> int:
        return max(1, round(self.mlp_density * self.neurons))

    def random(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, std)

    def tickets(self) -> torch.Tensor:
        """Zeros that the kernels count in and leave as zeros, as a step has them; int32."""
        return torch.zeros(self.batch * self.heads, dtype=torch.int32, device=self.device)

    def choose(self, units: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and count of a random set, as the kernels take them: room for all, the kept in ascending order."""
        idx = torch.zeros(units, dtype=torch.int32, device=self.device)
        idx[:kept] = torch.randperm(units, device=self.device)[:kept].sort().values.int()
        return idx, torch.full((1,), kept, dtype=torch.int32, device=self.device)

    def buffers(self, whole: int, read: int) -> int:
        """How many buffers of `whole` bytes, of which a call reads `read`, overflow the cache four times over.

        Two at least, 16 at most, no more than half of the free memory holds. Raises ValueError where two do not fit.
        """
        cache = _CACHE
        if self.device.type == "cuda":
            cache = max(cache, torch.cuda.get_device_properties(self.device).L2_cache_size)
        check_memory(2 * whole, self.device, f"two buffers of a layer of {self.shape.name}/{self.tp}")
        fitting = free_bytes(self.device) // (2 * whole)
        return max(2, min(_MAX_BUFFERS, fitting, math.ceil(4 * cache / read)))


@dataclass(frozen=True)
class Case:
    """One operation: the same on each of several buffers.

    nbytes    that a call must read
    variant   what is behind a dense row
    """

    kernel: str
    system: str
    calls: list[Callable[[], object]]
    nbytes: int
    variant: str | None = None


def kernel_rows(layer: Layer, repeats: int, limit: float, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of all operations for one layer; limit in GB/s."""
    rows = []
    with torch.no_grad():
        for cases in (mlp_cases, projection_cases, attention_cases, predictor_cases, recover_cases, norm_cases):
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
    up = [layer.random(N, D, std=_STD) for _ in range(R)]
    down = [layer.random(N, D, std=_STD) for _ in range(R)]
    sets = [layer.choose(N, K) for _ in range(R)]
    x, h = layer.random(layer.batch, D), layer.random(layer.batch, N).abs() + 1
    bias = torch.full((N,), 8 * _STD * math.sqrt(D), dtype=layer.dtype, device=layer.device)

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
        yield Case("gather_up_proj", system, _calls(R, fc1), matrix + rows * w, variant)
        yield Case("gather_down_proj", system, _calls(R, lambda i, fc2=fc2: fc2(i, h)), matrix, variant)
        both = _calls(R, lambda i, fc1=fc1, fc2=fc2: fc2(i, fc1(i)))
        yield Case("sparse_mlp", system, both, 2 * matrix + rows * w, variant)


def projection_cases(layer: Layer) -> Iterator[Case]:
    """QKV and output projection of the kept heads, gathered and dense."""
    ops, D, H, K = ops_for(layer.device), layer.shape.hidden, layer.heads, layer.kept_heads
    head_dim, w = layer.shape.head_dim, layer.dtype.itemsize
    R = layer.buffers(4 * H * head_dim * D * w, K * head_dim * D * w)
    qkv = [layer.random(H, 3, head_dim, D, std=_STD) for _ in range(R)]
    out = [layer.random(H * head_dim, D, std=_STD) for _ in range(R)]
    sets = [layer.choose(H, K) for _ in range(R)]
    bias = layer.random(H, 3, head_dim)
    x, o = layer.random(layer.batch, D), layer.random(layer.batch, H * head_dim)

    def kept_out(i: int) -> torch.Tensor:
        return ops.gather_down_proj(o, out[i], *sets[i], group=head_dim)

    matrix = head_dim * D * w
    caches = [layer.random(layer.batch, H, 1, head_dim) for _ in range(2)]
    first = torch.zeros(1, dtype=torch.int32, device=layer.device)
    kept_in = _calls(R, lambda i: ops.gather_qkv(x, qkv[i], bias, *sets[i], *caches, first))
    dense_in = _calls(R, lambda i: F.linear(x, qkv[i].flatten(0, 2), bias.flatten()))
    yield Case("gather_qkv", "sparse", kept_in, 3 * K * (matrix + head_dim * w))
    yield Case("gather_qkv", "dense", dense_in, 3 * H * (matrix + head_dim * w), "F.linear")
    yield Case("out_proj", "sparse", _calls(R, kept_out), K * matrix)
    dense_out = _calls(R, lambda i: F.linear(o, out[i].view(D, H * head_dim)))
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

    yield Case("decode_attention", "sparse", _calls(R, kept), 2 * B * K * T * head_dim * w)
    every_head = 2 * B * H * T * head_dim * w
    yield Case("decode_attention", "dense", _calls(R, every), every_head, "scaled_dot_product_attention")


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
    yield Case("predict_select", "sparse", _calls(R, kept), nbytes)
    yield Case("predict_select", "dense", _calls(R, top), nbytes, "F.linear, topk")


def recover_cases(layer: Layer) -> Iterator[Case]:
    """A run of missing keys and values of every kept head, twice what most steps have; dense never misses any."""
    ops, B, H, K = ops_for(layer.device), layer.batch, layer.heads, layer.kept_heads
    D, head_dim, w = layer.shape.hidden, layer.shape.head_dim, layer.dtype.itemsize
    position = layer.context - 1
    R = layer.buffers(3 * H * head_dim * D * w, 2 * K * head_dim * D * w)
    qkv = [layer.random(H, 3, head_dim, D, std=_STD) for _ in range(R)]
    bias = layer.random(H, 3, head_dim)
    inputs = layer.random(B, _WINDOW + 1, D)
    keys, values = (layer.random(B, H, layer.context, head_dim) for _ in range(2))
    chosen = torch.zeros(H, dtype=torch.bool, device=layer.device)
    chosen[layer.choose(H, K)[0][:K].long()] = True
    now = torch.full((1,), position, dtype=torch.int32, device=layer.device)
    watermark = torch.full((H,), max(0, position - _MISSED), dtype=torch.int32, device=layer.device)

    def recover(i: int) -> None:
        ops.recover_kv(inputs, qkv[i], bias, chosen, watermark, now, keys, values, window=_WINDOW)

    yield Case("recover_kv", "sparse", _calls(R, recover), 2 * K * head_dim * (D + 1) * w)


def norm_cases(layer: Layer) -> Iterator[Case]:
    """Residual add, bias and layer norm in one launch, and by torch."""
    ops, B, D, w = ops_for(layer.device), layer.batch, layer.shape.hidden, layer.dtype.itemsize
    module = torch.nn.LayerNorm(D, dtype=layer.dtype, device=layer.device)
    norm, bias, y, hidden = Norm.of(module), layer.random(D), layer.random(B, D), layer.random(B, D)

    def separate() -> torch.Tensor:
        return module(hidden.add_(y + bias))

    # Far too small to leave the cache: what counts is the launch.
    nbytes = (2 * B + 3) * D * w
    yield Case("add_norm", "sparse", [lambda: ops.add_norm(y, bias, hidden, norm)] * _MAX_BUFFERS, nbytes)
    yield Case("add_norm", "dense", [separate] * _MAX_BUFFERS, nbytes, "add, layer_norm")


def _calls(buffers: int, call: Callable[[int], object]) -> list[Callable[[], object]]:
    return [lambda i=i: call(i) for i in range(buffers)]


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
        kernel=case.kernel,
        variant=case.variant,
        sizes=f"{layer.shape.hidden}x{layer.neurons}",
        read_bytes=case.nbytes,
        buffers=len(case.calls),
        limit_gb_per_s=limit,
    )
