"""What the kernel benchmark and the tuning measure: a rank's share of a decoder layer, and one operation on it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dejavu_ds.bench.shapes import Shape
from dejavu_ds.bench.traffic import check_memory, free_bytes

STD = 0.02
"""Of random weights."""
MAX_BUFFERS = 16
# The L2 cache of an H200, in bytes; more than a CPU's share of its last one, as a rule.
_CACHE = 50 * 2**20


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
        return max(2, min(MAX_BUFFERS, fitting, math.ceil(4 * cache / read)))


@dataclass(frozen=True)
class Case:
    """One operation: the same on each of several buffers.

    nbytes    that a call must read
    variant   what is behind a dense row
    quantize  "nf4" or "fp4" where the weights are in 4 bits
    """

    kernel: str
    system: str
    calls: list[Callable[[], object]]
    nbytes: int
    variant: str | None = None
    quantize: str | None = None


def calls_on(buffers: int, call: Callable[[int], object]) -> list[Callable[[], object]]:
    """The call on each of so many buffers."""
    return [lambda i=i: call(i) for i in range(buffers)]
