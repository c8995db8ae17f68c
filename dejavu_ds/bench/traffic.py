"""Bytes: what a decode step must read, what a model takes, and how fast this machine reads."""

import statistics
from dataclasses import dataclass

import psutil
import torch

from dejavu_ds.bench.shapes import Shape
from dejavu_ds.bench.timing import time_calls
from dejavu_ds.kernels.predict_select import whole_rank

# Bytes a weight of the decoder layers; 4-bit codes with an fp32 absmax for every 64 of them.
QUANTIZED_BYTES = {"nf4": 0.5 + 4 / 64, "fp4": 0.5 + 4 / 64}


def step_bytes(
    shape: Shape,
    itemsize: int,
    *,
    tp: int = 1,
    batch: int = 1,
    context: int,
    mlp_density: float = 1.0,
    head_density: float = 1.0,
    ranks: dict[str, int] | None = None,
    active_share: float = 1.0,
    quantize: str | None = None,
) -> int:
    """Bytes that one rank must read for one decode step.

    A kept neuron is its row of fc1 with its bias, and its row of fc2 if its activation is not zero; a kept head its
    rows of q, k, v and the output projection with their biases, and its keys and values of every sequence. To these
    come the norms, the biases that are added once, the predictors, the embeddings and the language-model head.

    Args:
        itemsize: bytes of an activation, and of a weight that is not quantised.
        tp: ranks that share the heads, the neurons and the head's columns.
        context: keys that each sequence attends to.
        mlp_density, head_density: kept by the whole batch together.
        ranks: {"mlp": r, "heads": r} of the predictors, which are padded; a unit without an entry has none.
        active_share: of the kept neurons, those whose fc2 row is needed; 1 for a dense step.
        quantize: key of `QUANTIZED_BYTES`, or None.
    """
    D, F, H = shape.hidden, shape.ffn / tp, shape.heads / tp
    w = itemsize if quantize is None else QUANTIZED_BYTES[quantize]
    heads = head_density * H * shape.head_dim
    neurons = mlp_density * F
    attention = heads * (3 * (D * w + itemsize) + D * w) + D * itemsize
    mlp = neurons * (D * w + itemsize + active_share * D * w) + D * itemsize
    kv = batch * context * 2 * heads * itemsize
    units = {"mlp": F, "heads": H}
    padded = {unit: whole_rank(r, itemsize) for unit, r in (ranks or {}).items()}
    predictors = sum((r * (D + 1) + units[unit] * (r + 1)) * itemsize for unit, r in padded.items())
    layer = attention + mlp + kv + predictors + 4 * D * itemsize
    ends = (shape.vocab * D / tp + 2 * D + 2 * batch * D) * itemsize
    return round(shape.layers * layer + ends)


def model_bytes(shape: Shape, itemsize: int, tp: int = 1, quantize: str | None = None) -> int:
    """Bytes that one rank needs to hold the model while it is set up: its shard, one layer more, both embeddings.

    quantize  key of `QUANTIZED_BYTES` for the layers; the one more and the embeddings are not packed
    """
    D = shape.hidden
    layer = shape.block_parameters / tp
    ends = (shape.vocab + shape.positions + 2) * D + shape.vocab * D / tp
    packed = itemsize if quantize is None else QUANTIZED_BYTES[quantize]
    return round(shape.layers * layer * packed + (layer + ends) * itemsize)


def cache_bytes(shape: Shape, itemsize: int, tp: int, batch: int, tokens: int) -> int:
    """Bytes of keys and values on one rank."""
    return shape.layers * 2 * batch * tokens * shape.hidden // tp * itemsize


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can be had now; cached blocks of ours are given back first."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def check_memory(needed: int, device: torch.device, what: str) -> None:
    """Raise ValueError where `what` needs more bytes than are free."""
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"{what} needs {needed:,} bytes on each {device.type} device, {free:,} are free; take a smaller shape or "
            "batch, or spread it over more GPUs with tp --num-gpus"
        )


@dataclass(frozen=True)
class Limit:
    """Memory bandwidth measured here: the best of copying, summing, and a matrix-vector product, in GB/s (10^9)."""

    copy: float
    total: float
    product: float

    @property
    def gb_per_s(self) -> float:
        return max(self.copy, self.total, self.product)

    @classmethod
    def measure(cls, device: torch.device) -> "Limit":
        """Over buffers that no cache holds; takes well under a second."""
        size = 2**32 if device.type == "cuda" else 2**28
        size = min(size, free_bytes(device) // 4)
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        width = 8192
        source = torch.ones(size // (width * dtype.itemsize), width, dtype=dtype, device=device)
        target = torch.empty_like(source)
        x = torch.ones(width, dtype=dtype, device=device)
        repeats = 20 if device.type == "cuda" else 5

        def rate(call, nbytes: int) -> float:
            return nbytes / statistics.median(time_calls(call, repeats, device)) / 1e6

        return cls(
            copy=rate(lambda: target.copy_(source), 2 * source.nbytes),
            total=rate(lambda: source.view(torch.int32).sum(dtype=torch.int64), source.nbytes),
            product=rate(lambda: torch.mv(source, x), source.nbytes),
        )
