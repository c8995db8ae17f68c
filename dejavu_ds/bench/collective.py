"""One sum over the ranks of a token's activations, of which a decode step has two a layer."""

from typing import Any

import torch

from dejavu_ds.bench.results import make_row, one_line
from dejavu_ds.bench.source import Source
from dejavu_ds.bench.timing import peak_bytes, spread, time_rotated

_CALLS = 64


def all_reduce_rows(source: Source, benchmark: str, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    """Two rows for each batch size: the engine's way, and DeepSpeed's all-reduce. Call on every rank.

    On a GPU the calls are replayed in a CUDA graph, as in a step. The engine's sums are of partial results in fp32, in
    as many parts as a step has them.
    """
    tp, rows = source.engine().tp, []
    for batch in batches:
        shape = batch, source.shape.hidden
        for system, call, dtype in (
            ("dense", tp.sum_partial, torch.float32),
            ("deepspeed", tp.all_reduce, source.dtype),
        ):
            x = tp.partial(*shape, source.device) if system == "dense" else None
            x = torch.zeros(shape, dtype=dtype, device=source.device) if x is None else x.zero_()
            row = make_row(
                benchmark=benchmark,
                shape=source.shape.name,
                system=system,
                tp=source.tp,
                batch=batch,
                dtype=str(dtype).removeprefix("torch."),
                kernel="all_reduce",
                read_bytes=x.nbytes,
            )
            try:
                calls = [lambda x=x, call=call: call(x)] * _CALLS
                row |= spread(time_rotated(calls, repeats, source.device))
                row["peak_bytes"] = peak_bytes(source.device)
            except Exception as problem:
                row["error"] = one_line(problem)
            rows.append(row)
    return rows
