"""One all-reduce of a token's activations, of which a decode step has two a layer."""

from typing import Any

import torch

from dejavu_ds.bench.results import make_row, one_line
from dejavu_ds.bench.source import Source
from dejavu_ds.bench.timing import peak_bytes, spread, time_rotated

_CALLS = 64


def all_reduce_rows(source: Source, benchmark: str, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each batch size, through the engine's own collective. Call on every rank.

    On a GPU the calls are replayed in a CUDA graph, as in a step.
    """
    tp, rows = source.engine().tp, []
    for batch in batches:
        x = torch.zeros(batch, source.shape.hidden, dtype=source.dtype, device=source.device)
        row = make_row(
            benchmark=benchmark,
            shape=source.shape.name,
            system="dense",
            tp=source.tp,
            batch=batch,
            dtype=str(source.dtype).removeprefix("torch."),
            kernel="all_reduce",
            read_bytes=x.nbytes,
        )
        try:
            row |= spread(time_rotated([lambda x=x: tp.all_reduce(x)] * _CALLS, repeats, source.device))
            row["peak_bytes"] = peak_bytes(source.device)
        except Exception as problem:
            row["error"] = one_line(problem)
        rows.append(row)
    return rows
