"""One all-reduce of a token's activations, of which a decode step has two a layer."""

from typing import Any

import torch

from dejavu_ds.bench.decode import Plan
from dejavu_ds.bench.results import make_row
from dejavu_ds.bench.timing import spread, time_rotated

_CALLS = 64


def all_reduce_rows(plan: Plan, repeats: int) -> list[dict[str, Any]]:
    """A row for each batch size, through the engine's own collective; nothing to measure on one rank.

    Call on every rank. On a GPU the calls are replayed in a CUDA graph, as in a step.
    """
    source = plan.source
    if source.tp == 1:
        return []
    tp, rows = source.engine().tp, []
    for batch in sorted({load.batch for load in plan.loads}):
        x = torch.zeros(batch, source.shape.hidden, dtype=source.dtype, device=source.device)
        row = make_row(
            benchmark=plan.benchmark,
            shape=source.shape.name,
            system="dense",
            tp=source.tp,
            batch=batch,
            dtype=str(source.dtype).removeprefix("torch."),
            kernel="all_reduce",
            read_bytes=x.nbytes,
        )
        rows.append(row | spread(time_rotated([lambda x=x: tp.all_reduce(x)] * _CALLS, repeats, source.device)))
    return rows
