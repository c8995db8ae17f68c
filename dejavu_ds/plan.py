"""Which units run dense because that is faster: measured, not guessed.

Whether reading fewer weights saves time depends on the density, which grows with the batch, on the shapes and on the
machine. So in mode "auto" the first step at each batch size is timed each way, with the tokens, predictors and cache
that it really has, and the fastest way is kept for batches of that size.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection
from statistics import median

import torch

from dejavu_ds.cache import DejaVuCache
from dejavu_ds.collectives import TensorParallel

logger = logging.getLogger("dejavu_ds")

_WARM_UP, _REPEATS = 2, 7
# A way that is faster by less than this share is not worth another text; nor would it be the same one in the next run.
_MARGIN = 0.03


def ways(units: Collection[str]) -> list[frozenset[str]]:
    """Every set of units that could run dense, the fully sparse way first."""
    return [frozenset(c) for n in range(len(units) + 1) for c in itertools.combinations(sorted(units), n)]


def fastest_way(
    units: Collection[str],
    cache: DejaVuCache,
    make_step: Callable[[], Callable[[], object]],
    moving: list[torch.Tensor],
    tp: TensorParallel,
) -> tuple[frozenset[str], dict[frozenset[str], float]]:
    """The units to run dense in this cache, and the milliseconds a step took each way; the same on every rank.

    units      that have selectors
    cache      whose next step is measured: prefilled, its tokens set; nothing of it has moved on afterwards
    make_step  makes the step of the cache as its `dense_units` then say
    moving     tensors that a step moves on, which are put back after each
    """
    before, times = [tensor.clone() for tensor in moving], {}
    for way in ways(units):
        cache.dense_units = way
        step, taken = make_step(), []
        for _ in range(_WARM_UP + _REPEATS):
            taken.append(_milliseconds(step, cache.position.device))
            for tensor, value in zip(moving, before, strict=True):
                tensor.copy_(value)
        times[way] = median(taken[_WARM_UP:])
    # The clocks of the ranks differ, their ways must not: rank 0's decide.
    shared = tp.broadcast(torch.tensor(list(times.values()), dtype=torch.float64, device=cache.position.device))
    times = dict(zip(times, shared.tolist(), strict=True))
    best = min(times, key=times.get)
    if times[best] > (1 - _MARGIN) * times[frozenset()]:
        best = frozenset()
    if best and tp.rank == 0:
        names = " and ".join("MLP" if unit == "mlp" else unit for unit in sorted(best))
        logger.warning(
            "batch of %d: %s %s dense: %.3f ms a step, %.3f ms sparse",
            cache.batch_size,
            names,
            "runs" if names == "MLP" else "run",
            times[best],
            times[frozenset()],
        )
    return best, times


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)
    begun = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begun)
