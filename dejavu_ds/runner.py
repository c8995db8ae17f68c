"""Who runs the decode steps of an engine: eagerly, or as CUDA graphs that are kept with the caches."""

import gc
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch

from dejavu_ds import decode
from dejavu_ds.cache import DejaVuCache
from dejavu_ds.graph import GraphedStep
from dejavu_ds.plan import fastest_way

if TYPE_CHECKING:
    from dejavu_ds.engine import DejaVuEngine
    from dejavu_ds.token_loop import TokenChooser

_LEAST_CAPACITY = 256


_RUNNERS: "WeakSet[StepRunner]" = WeakSet()


def release_graphs() -> None:
    """Let go of the captured steps of every engine in this process; they are captured anew when needed.

    Before the process group is destroyed: NCCL waits for the graphs that know its communicators.
    """
    for runner in list(_RUNNERS):
        runner.release()
    gc.collect()


class CapturedCache(NamedTuple):
    """What was captured for one cache: its step, and the choices that go on from the step's logits.

    A choice is kept with its chooser, whose tensors the graph uses.
    """

    step: GraphedStep
    choices: "dict[str, tuple[GraphedStep, TokenChooser]]"


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
        self._optional: frozenset[str] = frozenset()
        self._ways: dict[int, frozenset[str]] = {}
        self._version = 0
        self._captured: WeakKeyDictionary[DejaVuCache, CapturedCache] = WeakKeyDictionary()
        self._logits: torch.Tensor | None = None
        self._spare: DejaVuCache | None = None
        _RUNNERS.add(self)

    @property
    def uses_graphs(self) -> bool:
        """Whether steps are replayed: on a GPU, unless turned off or the selections cannot be captured."""
        return self._cuda_graph and self._capturable

    def forget(self, capturable: bool, optional: Collection[str]) -> None:
        """The steps are other ones from here on.

        capturable  whether a graph can hold them
        optional    the units that may run dense where that is faster, the same on every rank
        """
        self._capturable, self._optional = capturable, frozenset(optional)
        self._ways.clear()
        self._version += 1
        self.release()

    def release(self) -> None:
        """Let go of what was captured and of the spare cache, and so of their memory."""
        self._captured.clear()
        self._logits = self._spare = None

    def step(self, cache: DejaVuCache) -> torch.Tensor:
        """One decode step of `cache.tokens`: [B, V] logits, which the next step may overwrite.

        The cache must have room for a token.
        """
        if cache.planned != self._version:
            self._plan(cache)
        self._engine.stats.count_step(cache.dense_units)
        self._logits = self._capture(cache).step() if self.uses_graphs else self._eager(cache)
        cache.length += 1
        return self._logits

    def chooser(self, cache: DejaVuCache, chooser: "TokenChooser") -> Callable[[], torch.Tensor]:
        """`chooser` on the logits of the cache's last step, as a graph where steps are; after a first step."""
        if not self.uses_graphs:
            return lambda: chooser(self._logits, cache)
        captured, key = self._capture(cache), chooser.key()
        if key not in captured.choices:
            logits, moving = captured.step.output, [cache.tokens, cache.live]
            captured.choices[key] = GraphedStep(lambda: chooser(logits, cache), moving), chooser
        return captured.choices[key][0]

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
        cache.planned, cache.dense_units = self._version, frozenset()
        if not self._optional:
            return
        if cache.batch_size not in self._ways:

            def make_step() -> Callable[[], torch.Tensor]:
                return self._capture(cache).step if self.uses_graphs else lambda: self._eager(cache)

            moving = cache.progress() + self._engine.stats.counters()
            tp = self._engine.tp
            self._ways[cache.batch_size], _ = fastest_way(self._optional, cache, make_step, moving, tp)
        cache.dense_units = self._ways[cache.batch_size]

    def _capture(self, cache: DejaVuCache) -> CapturedCache:
        """What is captured of a cache; anew if the cache has been enlarged since, or something else runs dense."""
        made_for = cache.capacity, cache.dense_units
        captured = self._captured.get(cache)
        if captured is None or captured.step.made_for != made_for:
            self._captured.pop(cache, None)  # its memory first
            moving = cache.progress() + self._engine.stats.counters()
            step = GraphedStep(lambda: self._eager(cache), moving, made_for)
            captured = self._captured[cache] = CapturedCache(step, {})
        return captured

    def _eager(self, cache: DejaVuCache) -> torch.Tensor:
        return decode.decode_one_token(self._engine.module, self._engine.policy, cache, cache.tokens)
