"""The MLP of a block, dense, masked or gathered."""

from collections.abc import Callable

import torch
from torch import nn

from dejavu_ds.cache import DejaVuCache
from dejavu_ds.collectives import TensorParallel
from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.dense import Weight, linear, times
from dejavu_ds.kernels.ops import Ops
from dejavu_ds.selection import Selection, Selector, selects


class SparseMLP(nn.Module):
    """y = relu(x fc1^T + b1) fc2^T + b2 over the F neurons of this rank, or over the kept ones.

    Storage makes one neuron one contiguous row in both matrices; prefill and decode read the same copy.
        fc1  [F, D], b1 [F] or None      as nn.Linear stores it
        fc2  [F, D], b2 [D] or None      transposed
    fc1 and fc2 are what `store` makes of them, parameters or in 4 bits, and `ops` takes those. A neuron left out and a
    neuron whose ReLU is zero are the same thing, so a selection that covers every positive neuron gives the dense
    result.
    """

    def __init__(
        self, fc1: nn.Module, fc2: nn.Module, ops: Ops, tp: TensorParallel, store: Callable[[torch.Tensor], Weight]
    ) -> None:
        super().__init__()
        self.fc1 = store(fc1.weight.detach())
        self.b1 = frozen(fc1.bias)
        self.fc2 = store(fc2.weight.detach().t())
        self.b2 = frozen(fc2.bias)
        self.selector: Selector | None = None
        self.masked = False
        self._ops = ops
        self._tp = tp
        self._every_neuron = Selection.all_of(self.neurons, self.fc1.device)

    @property
    def neurons(self) -> int:
        """Neurons on this rank; shards may be uneven."""
        return self.fc1.shape[0]

    def prefill(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Dense over [B, S, D]; `keep` [B, S, F] bool zeroes neurons token by token."""
        return self._finish(self._product(x, keep))

    def decode(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        cache: DejaVuCache,
        norm: Norm | None,
        ring: torch.Tensor | None,
        last: bool,
        ahead: bool,
    ) -> torch.Tensor:
        """One token a sequence.

        Args:
            x: [B, D], the normalised input.
            hidden: [B, D], the residual stream; the result is added in place.
            norm: of what comes next.
            ring: [B, R, D], where the next attention keeps its inputs, or None.
            last: of the step, which then moves the cache's position on.
            ahead: nothing is selected in this step, so weights may be loaded while the launch before runs.

        Returns:
            [B, D], the normalised input of what comes next.
        """
        idx, count, mask = self.selector.join() if selects(self.selector, cache) else self._every_neuron
        if self.masked:
            y = self._product(x, mask)
        else:
            h = self._ops.gather_up_proj(x, self.fc1, self.b1, idx, count, relu=True, ahead=ahead)
            y = self._ops.gather_down_proj(
                h,
                self.fc2,
                idx,
                count,
                skip_zeros=True,
                out=self._tp.partial(*x.shape, x.device),
            )
        moves = (cache.position, cache.position_ids) if last else None
        y = self._tp.sum_partial(y)
        return self._ops.add_norm(y, self.b2, hidden, norm, ring, cache.position, moves, lets_in=ahead and not last)

    def _product(self, x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of the dense result, without b2."""
        h = torch.relu(linear(x, self.fc1, self.b1))
        return times(h if keep is None else h * keep, self.fc2)

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        y = self._tp.all_reduce(y)
        return y if self.b2 is None else y + self.b2


def frozen(tensor: torch.Tensor | None) -> nn.Parameter | None:
    """A parameter that asks for no gradient, or None."""
    return None if tensor is None else nn.Parameter(tensor.detach().contiguous(), requires_grad=False)
