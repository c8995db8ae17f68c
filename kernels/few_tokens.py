"""Products of a few tokens with fp32 weights on a CPU: what a decode step's twins compute there.

torch gives the product of one or two tokens with a matrix to one thread, which does not keep memory busy.
Here a weight is cut into blocks of rows, one or more a thread: a batch of matrices, which torch spreads over its
threads. Rows that are gathered are not copied: a product at given places of the result, which torch knows for sparse
matrices, reads each where it lies. Sums are torch's, in fp32. Everything else is left to torch as it is.
"""

import warnings
from functools import cache

import torch
import torch.nn.functional as F

# With more, torch's product is as fast as this one.
_FEW = 2


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """torch.nn.functional.linear, x [..., D], w [N, D], b [N] or None: [..., N]."""
    blocks = torch.get_num_threads()
    rows = w.shape[0] // blocks
    if blocks == 1 or rows == 0 or not _is_few(x):
        return F.linear(x, w, b)
    tokens, whole = x.reshape(-1, x.shape[-1]), blocks * rows
    y = torch.bmm(w[:whole].unflatten(0, (blocks, rows)), tokens.t().expand(blocks, -1, -1)).flatten(0, 1).t()
    if whole < w.shape[0]:
        y = torch.cat((y, F.linear(tokens, w[whole:])), dim=1)
    return (y.contiguous() if b is None else y + b).view(*x.shape[:-1], -1)


def times(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """h [..., N] @ w [N, D]: [..., D]."""
    blocks = torch.get_num_threads()
    rows = w.shape[0] // blocks
    if blocks == 1 or rows == 0 or not _is_few(h):
        return h @ w
    tokens, whole = h.reshape(-1, h.shape[-1]), blocks * rows
    of_blocks = tokens[:, :whole].reshape(-1, blocks, rows).transpose(0, 1)
    y = torch.bmm(of_blocks, w[:whole].unflatten(0, (blocks, rows))).sum(0)
    if whole < w.shape[0]:
        y = y + tokens[:, whole:] @ w[whole:]
    return y.view(*h.shape[:-1], -1)


def can_gather(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether `gathered_linear` takes x and w: one token, fp32, on a CPU."""
    return len(x) == 1 and x.dtype == w.dtype == torch.float32 and x.device.type == w.device.type == "cpu"


def gathered_linear(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [1, D] times rows `rows` [n], int32, of w [N, D], in their order: [1, n]."""
    _without_a_warning_of_beta()
    n, threads = rows.numel(), torch.get_num_threads()
    if n == 0:
        return x.new_empty(1, 0)
    # A row of the sparse matrix is one thread's work. Zeros, since what was there is scaled by 0 and added.
    ends = torch.arange(threads + 1, dtype=torch.int32).mul_(-(-n // threads)).clamp_(max=n)
    places = torch.sparse_csr_tensor(ends, rows, x.new_zeros(n), (threads, len(w)), check_invariants=False)
    tokens = x.expand(threads, -1).contiguous()
    return torch.sparse.sampled_addmm(places, tokens, w.t(), beta=0.0).values()[None]


def _is_few(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and 0 < x.shape[:-1].numel() <= _FEW


@cache
def _without_a_warning_of_beta() -> None:
    """Make a first CSR tensor: torch warns, once in a process, that they are in beta, which is nothing for users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = torch.zeros(1, dtype=torch.int32)
        torch.sparse_csr_tensor(none.repeat(2), none[:0], torch.zeros(0), (1, 1), check_invariants=False)
