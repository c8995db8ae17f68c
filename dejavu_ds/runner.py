"""Who runs the decode steps of an engine: eagerly, or as CUDA graphs that are kept with the caches."""

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from dejavu_ds import decode
from dejavu_ds.cache import DejaVuCache
from dejavu_ds.graph import GraphedStep
from dejavu_ds.plan import fastest_way

if TYPE_CHECKING:
    from dejavu_ds.engine import DejaVuEngine
    from dejavu_ds.token_loop import TokenChooser

_LEAST_CAPACITY = 256


class StepRunner:
    """Runs decode steps; one graph for each cache that is decoded in, for a graph knows addresses.

    Args:
        engine: whose steps these are.
        cuda_graph: replay captured steps where that is possible.
    """

    def __init__(self, engine: "DejaVuEngine", cuda_graph: bool) -> None:
        self._engine = engine
        self._cuda_graph = cuda_graph and engine.device.type == "cuda"
        self._capturable = True
        self._optional: set[str] = set()
        self._ways: dict[int, frozenset[str]] = {}
        self._graphs: WeakKeyDictionary[DejaVuCache, GraphedStep] = WeakKeyDictionary()
        self._logits: torch.Tensor | None = None
        self._spare: DejaVuCache | None = None

    @property
    def uses_graphs(self) -> bool:
        """Whether steps are replayed: on a GPU, unless turned off or the selections cannot be captured."""
        return self._cuda_graph and self._capturable

    def forget(self, capturable: bool, optional: set[str]) -> None:
        """The steps are other ones from here on.

        capturable  whether a graph can hold them
        optional    the units that may run dense where that is faster
        """
        self._capturable, self._optional = capturable, optional
        self._graphs.clear()
        self._ways.clear()

    def step(self, cache: DejaVuCache) -> torch.Tensor:
        """One decode step of `cache.tokens`: [B, V] logits, which the next step may overwrite.

        The cache must have room for a token.
        """
        if self._optional and not cache.planned:
            self._plan(cache)
        self._engine.stats.count_step(cache.dense_units)
        self._logits = self._graph(cache)() if self.uses_graphs else self._eager(cache)
        cache.length += 1
        return self._logits

    def chooser(self, cache: DejaVuCache, chooser: "TokenChooser") -> Callable[[], torch.Tensor]:
        """`chooser` on the logits of the cache's last step, as a graph where steps are."""
        if not self.uses_graphs:
            return lambda: chooser(self._logits, cache)
        graphed, key = self._graph(cache), chooser.key()
        if key not in graphed.choosers:
            logits, moving = graphed.output, [cache.tokens, cache.live]
            graphed.choosers[key] = GraphedStep(lambda: chooser(logits, cache), moving, cache.capacity)
        return graphed.choosers[key]

    def spare_cache(self, batch_size: int, tokens: int) -> DejaVuCache:
        """An empty cache with room for so many tokens: the one kept of an earlier generation if it fits, with its
        captured steps, else a new one. Capacities are powers of 2 from 256 on, so that one serves many prompts."""
        spare, self._spare = self._spare, None
        engine = self._engine
        made_for = batch_size, engine.cache_shapes()
        if spare is not None and (spare.batch_size, spare.shapes) == made_for and spare.capacity >= tokens:
            spare.reset()
            return spare
        del spare  # before the new one is allocated
        capacity = max(_LEAST_CAPACITY, 1 << (tokens - 1).bit_length())
        return engine.new_cache(batch_size, max(tokens, min(capacity, engine.max_positions)))

    def keep_spare(self, cache: DejaVuCache) -> None:
        """Keep a cache that nobody else holds for the next `spare_cache`; it takes memory until then."""
        self._spare = cache

    def _plan(self, cache: DejaVuCache) -> None:
        """Decide what runs dense in this cache, before its first step: measured once for each batch size."""
        cache.planned = True
        if cache.batch_size in self._ways:
            cache.dense_units = self._ways[cache.batch_size]
            return

        def make_step() -> Callable[[], torch.Tensor]:
            self._graphs.pop(cache, None)
            return self._graph(cache) if self.uses_graphs else lambda: self._eager(cache)

        moving = cache.progress() + self._engine.stats.counters()
        cache.dense_units, times = fastest_way(self._optional, cache, make_step, moving, self._engine.tp)
        self._ways[cache.batch_size] = cache.dense_units
        if cache.dense_units != list(times)[-1]:
            self._graphs.pop(cache, None)  # it holds the way that was measured last

    def _graph(self, cache: DejaVuCache) -> GraphedStep:
        """The captured step of a cache; captured now if it was not before, or the cache has been enlarged since."""
        graphed = self._graphs.get(cache)
        if graphed is None or graphed.capacity != cache.capacity:
            moving = cache.progress() + self._engine.stats.counters()
            graphed = self._graphs[cache] = GraphedStep(lambda: self._eager(cache), moving, cache.capacity)
        return graphed

    def _eager(self, cache: DejaVuCache) -> torch.Tensor:
        return decode.decode_one_token(self._engine.module, self._engine.policy, cache, cache.tokens)
