"""A decode step captured in a CUDA graph."""

import gc
from collections.abc import Callable, Hashable
from functools import cache

import torch


class GraphedStep:
    """A step whose launches are recorded once and then replayed together.

    A decode step is hundreds of short kernels; launching them one by one takes the host longer than they run. All that
    varies from step to step, counts and positions, is read from device memory, so the recorded launches stay right.

    The graph knows addresses and keeps nothing alive but its own results: whoever holds it must hold what the step
    uses. The step itself is not kept, so that a graph may be held by what it works on.

    Args:
        step: what to capture: reads and writes tensors of fixed addresses only, never asks the device for a value.
        moving: tensors that a step moves on. The step runs once before it is captured, which compiles its kernels and
            sets up libraries and communicators; these are then put back.
        made_for: for the owner to tell whether the graph still fits.

    Attributes:
        output: what the step returned; every replay writes it anew.
    """

    def __init__(self, step: Callable[[], torch.Tensor], moving: list[torch.Tensor], made_for: Hashable = None) -> None:
        self.made_for = made_for
        before = [tensor.clone() for tensor in moving]
        random_state = torch.cuda.get_rng_state()
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(moving, before, strict=True):
            tensor.copy_(value)
        torch.cuda.set_rng_state(random_state)
        self._graph = torch.cuda.CUDAGraph()
        # What a collection frees may synchronise, which a capture forbids: collect before it, not in it.
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        try:
            # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self.output = step()
        finally:
            if collecting:
                gc.enable()

    def __call__(self) -> torch.Tensor:
        """Run the step once more."""
        self._graph.replay()
        return self.output


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures on a device: libraries keep a workspace for every stream that they have seen.

    What is captured on it goes ahead of what a step runs beside it.
    """
    return torch.cuda.Stream(device, priority=-1)
