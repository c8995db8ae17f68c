"""Times of steps and calls, in milliseconds, and the memory they took."""

import contextlib
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(
    step: Callable[[torch.Tensor], object], inputs: Sequence[torch.Tensor], device: torch.device
) -> tuple[list[float], list[float]]:
    """Run one step an input, one after another: what each took, and what each held the host for.

    On a GPU a step's time is that between the events at its end and at the end of the one before: the steps are queued
    without waiting, as a loop would that need not see its tokens, so host time shows only where it exceeds the
    device's.
    """
    host = []
    if device.type != "cuda":
        for tokens in inputs:
            start = time.perf_counter()
            step(tokens)
            host.append((time.perf_counter() - start) * 1e3)
        return host, host
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(inputs) + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for tokens, event in zip(inputs, events[1:], strict=True):
        start = time.perf_counter()
        step(tokens)
        host.append((time.perf_counter() - start) * 1e3)
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)], host


def time_calls(call: Callable[[], object], repeats: int, device: torch.device, warmup: int = 2) -> list[float]:
    """Times of single calls, each from an idle device."""
    for _ in range(warmup):
        call()
    synchronize(device)
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def time_rotated(calls: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Times of one call, averaged over all `calls`, which do the same on different buffers.

    On a GPU all calls are captured in one CUDA graph, which is then replayed: no launch from the host between them, and
    no buffer is left in the L2 cache from the replay before if together they exceed it.
    """
    for call in calls:  # kernels compile and tune before the capture
        call()
    synchronize(device)
    if device.type != "cuda":
        return [t / len(calls) for t in time_calls(lambda: [call() for call in calls], repeats, device, warmup=0)]
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # so that no output's memory serves the next call
    # Replays queue up behind one another, so the launch of a graph is hidden as well.
    times, _ = time_steps(lambda _: graph.replay(), [torch.empty(0)] * (repeats + 5), device)
    del kept
    return [t / len(calls) for t in times[5:]]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and 20/80 quantiles under the keys of a row."""
    p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
    return {"ms_median": statistics.median(times), "ms_p20": p20, "ms_p80": p80}


def reset_peak(device: torch.device) -> None:
    """Start a new count for `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Linux only; elsewhere the peak is that of the whole run.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Most bytes since `reset_peak`: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
