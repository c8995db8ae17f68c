"""The language-model head under tensor parallelism."""

import torch
from torch import nn

from dejavu_ds.collectives import TensorParallel
from dejavu_ds.kernels.few_tokens import linear


class RowParallelHead(nn.Module):
    """Head split along its input; the ranks' partial logits are summed.

    Takes the place of DeepSpeed's `LmHeadLinearAllreduce`, whose `inference_all_reduce` compiles an extension for
    minutes on a CPU. With tied embeddings the shard is a view of the embedding, which every rank holds whole: one
    copy in memory.

    Args:
        weight: [V, D_local], DeepSpeed's shard.
        bias: [V] or None, added after the sum.
        tied: [V, D] embedding, or None.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, tied: torch.Tensor | None, tp: TensorParallel
    ) -> None:
        super().__init__()
        self._tp = tp
        self._start = tp.offset(weight.shape[1], weight.device)
        columns = slice(self._start, self._start + weight.shape[1])
        self.weight = nn.Parameter(weight.detach() if tied is None else tied.detach()[:, columns], requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]"""
        local = hidden[..., self._start : self._start + self.weight.shape[1]]
        logits = self._tp.all_reduce(linear(local, self.weight))
        return logits if self.bias is None else logits + self.bias
