"""A decode step captured in a CUDA graph."""

from collections.abc import Callable

import torch


class GraphedStep:
    """A step whose launches are recorded once and then replayed together.

    A decode step is hundreds of short kernels; launching them one by one takes the host longer than they run. All that
    varies from step to step, counts and positions, is read from device memory, so the recorded launches stay right.

    Args:
        step: what to capture: reads and writes tensors of fixed addresses only, never asks the device for a value.
        moving: tensors that a step moves on. The step runs once before it is captured, which compiles its kernels and
            sets up libraries and communicators; these are then put back.
        capacity: of the cache that was captured, for the owner to compare.

    Attributes:
        output: what the step returned; every replay writes it anew.
        choosers: captured steps that go on from the output, by what they do.
    """

    def __init__(self, step: Callable[[], torch.Tensor], moving: list[torch.Tensor], capacity: int) -> None:
        self.capacity = capacity
        self.choosers: dict[str, GraphedStep] = {}
        before = [tensor.clone() for tensor in moving]
        random_state = torch.cuda.get_rng_state()
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            step()
        torch.cuda.current_stream().wait_stream(warm)
        for tensor, value in zip(moving, before, strict=True):
            tensor.copy_(value)
        torch.cuda.set_rng_state(random_state)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.output = step()

    def __call__(self) -> torch.Tensor:
        """Run the step once more."""
        self._graph.replay()
        return self.output
