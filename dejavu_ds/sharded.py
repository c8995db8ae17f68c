"""A dense model to collect from, whole in one process or split over the ranks of the DeepSpeed launcher.

Split, a rank computes some heads and neurons of every layer, but predictors are trained where a whole layer is known:
every rank owns a run of layers, receives their activations from all ranks, and trains their predictors alone. Buffers
and optimiser states are so divided by the number of ranks.
"""

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from dejavu_ds.checkpoint import Weights, tie
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.finite import raised_everywhere
from dejavu_ds.injection_policies import policy_for

if TYPE_CHECKING:
    from dejavu_ds.collectives import TensorParallel


@dataclass(frozen=True)
class ModelFacts:
    """What training has to know of a model before it is split."""

    num_layers: int
    hidden_size: int
    units: dict[str, int]
    """{"mlp": F, "heads": H}"""
    head_dim: int
    block_parameters: int
    fingerprint: dict

    @classmethod
    def of(cls, model: nn.Module, weights: Weights | None = None) -> "ModelFacts":
        """Of a plain model; `weights` are those of one on the meta device, unread."""
        policy = policy_for(model.config)
        layers = policy.layers(model)
        ffn, hidden_size = policy.parts(layers[0]).fc1.weight.shape
        head_dim = policy.head_dim(model.config)
        units = {"mlp": ffn, "heads": hidden_size // head_dim}
        parameters = sum(p.numel() for p in layers.parameters())
        of_model = fingerprint(model, None if weights is None else weights.whole)
        return cls(len(layers), hidden_size, units, head_dim, parameters, of_model)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model; alone, every call is a no-op."""

    rank: int = 0
    size: int = 1

    def owner(self, layer: int, num_layers: int) -> int:
        """The rank that trains this layer's predictors; runs of layers, so that few taps are kept twice."""
        return layer * self.size // num_layers

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise over the ranks, on all of them."""
        if self.size > 1:
            from deepspeed import comm

            comm.all_reduce(values)
        return values

    def whole(self, part: torch.Tensor, width: int, owner: int) -> torch.Tensor | None:
        """Columns [n, width] from every rank's part [n, w], in rank order, on the owner; None on the others.

        Parts may differ in width. Exact: each column is added to zeros.
        """
        if self.size == 1:
            return part
        from deepspeed import comm

        widths = torch.zeros(self.size, dtype=torch.int64, device=part.device)
        widths[self.rank] = part.shape[-1]
        start = int(self.sum(widths)[: self.rank].sum())
        columns = part.new_zeros(*part.shape[:-1], width)
        columns[..., start : start + part.shape[-1]] = part
        comm.reduce(columns, owner)
        return columns if self.rank == owner else None

    def gathered(self, value: object) -> list:
        """Every rank's value, in rank order, on all of them."""
        if self.size == 1:
            return [value]
        from deepspeed import comm

        values: list = [None] * self.size
        comm.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            self.gathered(None)


@dataclass(frozen=True)
class DenseModel:
    """A Hugging Face model, perhaps split, with its facts and the ranks that share it."""

    model: nn.Module
    facts: ModelFacts
    ranks: Ranks = field(default_factory=Ranks)

    @classmethod
    def of(cls, model: "nn.Module | DenseModel") -> "DenseModel":
        """A plain model of this process alone; what is one already is left as it is."""
        return model if isinstance(model, cls) else cls(model, ModelFacts.of(model))

    @classmethod
    def split(cls, model: PreTrainedModel, weights: Weights | None = None) -> "DenseModel":
        """Split a model over all processes of the job by DeepSpeed's tensor parallelism, in its dtype.

        Call on every rank. The model is taken over: a loaded one, or one from `open_checkpoint` with its weights, of
        which each rank then reads its part. Raises ValueError if its heads do not divide by the processes, or weights
        are not finite.
        """
        import deepspeed

        from dejavu_ds.collectives import TensorParallel, init_distributed, no_compilation

        facts = ModelFacts.of(model, weights)
        init_distributed()
        ranks = Ranks(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size())
        if facts.units["heads"] % ranks.size:
            raise ValueError(
                f"{facts.units['heads']} attention heads cannot be split over {ranks.size} processes: start a number "
                "that divides them"
            )
        if facts.num_layers < ranks.size:
            raise ValueError(f"{facts.num_layers} layers leave some of {ranks.size} processes without any: start fewer")
        policy, dtype = policy_for(model.config), model.dtype
        if weights is not None:
            # As in the engine: what is whole on every rank before DeepSpeed cuts the rest, which is still on meta.
            weights.fill(model, "", torch.device("cpu"), dtype, leave_out=(policy.layers(model), model.lm_head))
            tie(model)
        with no_compilation():
            engine = deepspeed.init_inference(
                model,
                tensor_parallel={"tp_size": ranks.size},
                dtype=dtype,
                injection_policy={type(policy.layers(model)[0]): policy.row_parallel},
                keep_module_on_host=weights is not None,
            )
        if weights is not None:
            _read_parts(engine.module, weights, dtype, TensorParallel.of(engine.mp_group))
        return cls(engine.module, facts, ranks)


def _read_parts(model: PreTrainedModel, weights: Weights, dtype: torch.dtype, tp: "TensorParallel") -> None:
    """This rank's parts of the blocks and the head, on its device; the rest goes there too. Collective."""
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    layers = policy_for(model.config).layers(model)
    prefix = next(f"{name}." for name, module in model.named_modules() if module is layers)
    with contextlib.closing(weights), raised_everywhere(tp, device):
        weights.fill(layers, prefix, device, dtype)
        if not model.config.tie_word_embeddings:
            weights.fill(model.lm_head, "lm_head.", device, dtype)
    model.to(device)
