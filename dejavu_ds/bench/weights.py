"""Models with random weights, made where they are used and never in the host's memory."""

import math
import zlib
from collections.abc import Callable, Collection
from statistics import NormalDist

import torch
from torch import nn
from transformers import OPTForCausalLM

from dejavu_ds.bench.shapes import Shape
from dejavu_ds.checkpoint import own_parameters

_STD = 0.02


def empty_model(shape: Shape, dtype: torch.dtype) -> OPTForCausalLM:
    """A Hugging Face model on the meta device: sizes without storage."""
    with torch.device("meta"):
        return OPTForCausalLM(shape.config()).to(dtype).eval().requires_grad_(False)


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device, active_share: float) -> OPTForCausalLM:
    """A Hugging Face model on `device`; see `fill`."""
    model = empty_model(shape, dtype).to_empty(device=device)
    model.tie_weights()
    fill(model, active_share)
    return model


def random_shards(shape: Shape, dtype: torch.dtype, active_share: float, split: Callable[[nn.Module], object]):
    """What `split` (DeepSpeed's tensor parallelism, say) makes of a model, with random weights on the device.

    DeepSpeed cuts tensors on the meta device as it cuts others, and gives storage only to what is left: a rank never
    holds more than its shard, whatever the whole takes.
    """
    engine = split(empty_model(shape, dtype))
    fill(engine.module, active_share)
    return engine


class RandomWeights:
    """In the place of a checkpoint's `Weights`: a rank's part of each block is made when its turn comes, so that an
    engine never holds more than what it keeps, packed or not, and one block.

    Args:
        hidden: width of the model.
        active_share: see `fill`.
    """

    def __init__(self, hidden: int, active_share: float) -> None:
        self._hidden, self._active_share = hidden, active_share

    @torch.no_grad()
    def fill(
        self,
        module: nn.Module,
        prefix: str,
        device: torch.device,
        dtype: torch.dtype,
        leave_out: Collection[nn.Module] = (),
    ) -> None:
        """As `Weights.fill`."""
        for owner, name, whole in own_parameters(module, prefix, leave_out):
            value = torch.empty(getattr(owner, name).shape, dtype=dtype, device=device)
            _fill_one(whole, value, self._hidden, self._active_share)
            setattr(owner, name, nn.Parameter(value, requires_grad=False))

    def close(self) -> None:
        """There is nothing to let go of."""


@torch.no_grad()
def fill(model: nn.Module, active_share: float) -> None:
    """Random weights in place: normal with deviation 0.02 as OPT is initialised, norms 1, biases 0.

    The numbers depend on a tensor's name and size only, so replicated tensors are equal on all ranks.

    Args:
        model: of Hugging Face, split by DeepSpeed or with our blocks.
        active_share: of the neurons, those that a token activates: fc1's bias is set to that quantile of what the
            weights give on normalised inputs. 0.5 is a bias of 0.
    """
    for name, parameter in model.named_parameters():
        _fill_one(name, parameter, model.config.hidden_size, active_share)


def _fill_one(name: str, tensor: torch.Tensor, hidden: int, active_share: float) -> None:
    """hidden  inputs that fc1 adds up."""
    last = name.rpartition(".")[2]
    if name.endswith(("fc1.bias", "mlp.b1")):
        deviation = _STD * math.sqrt(hidden)
        tensor.fill_(deviation * NormalDist().inv_cdf(min(active_share, 1 - 1e-6)))
    elif "norm" in name and last == "weight":
        tensor.fill_(1)
    elif last.endswith("bias") or tensor.dim() == 1:
        tensor.zero_()
    else:
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
        tensor.normal_(0, _STD, generator=generator)
