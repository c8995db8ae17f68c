"""A dense pass over text: what predictors read and what they should have said, for every layer at once.

Nothing goes to disk. One round of tokens is pushed through the model into buffers that the next round overwrites, so
memory is bounded by the capacity T of a round, whatever the length of the text. The buffers take, for L layers,

    T * L * (3 D + F) * 2 bytes

on the layers' devices: 0.3 GB for L 6, D 256, F 1024 and T 16,384, 30 GB for L 32, D 4096, F 16384. Records of
gradients add T * L * 4 H bytes for heads and T * L * 2 F for neurons. Where one unit kind alone is recorded, the F or a
D falls away. Of a model split over N ranks each holds the buffers of its L / N layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dejavu_ds.injection_policies import policy_for
from dejavu_ds.sharded import DenseModel
from dejavu_ds.taps import UNITS, Tap

# Tokens in one forward pass: enough to keep the matrix products efficient, little beside the buffers.
_FORWARD_TOKENS = 4096
# With a backward pass, which keeps all activations and the logits.
_BACKWARD_TOKENS = 1024


@dataclass
class LayerRecord:
    """What one layer did with T tokens. 16-bit, but for the residual.

    attention     [T, D] what q, k and v read (`dejavu_ds.taps`)
    mlp           [T, D] what fc1 reads
    head_outputs  [T, D] heads' outputs side by side, the input of out_proj
    activation    [T, F] relu of fc1: a neuron is active iff its value is above zero
    residual      [T]    fp32, squared norm of the residual stream after the block
    head_sensitivity  [T, H] fp32, sum over a head's outputs of |output * gradient| of the summed language-model loss
    mlp_sensitivity   [T, F] bf16, the same of each activation
    head_outputs and activation are None where that unit is not recorded, the last two unless asked for. A window's last
    token predicts nothing: its gradients are zero.
    """

    attention: torch.Tensor | None
    mlp: torch.Tensor | None
    head_outputs: torch.Tensor | None
    activation: torch.Tensor | None
    residual: torch.Tensor
    head_sensitivity: torch.Tensor | None = None
    mlp_sensitivity: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.residual)


def tap_input(records: list[LayerRecord], tap: Tap) -> torch.Tensor:
    """The recorded predictor input [T, D] at `tap`."""
    return getattr(records[tap.layer], tap.point)


@contextmanager
def watching(model: nn.Module, sink: Callable[[int, str, torch.Tensor], None]) -> Iterator[None]:
    """Call sink(layer, field of LayerRecord, tensor [..., width]) during forward passes inside the context.

    "residual" comes as the stream itself, [..., D]. The hooks are gone when the context is left, by an error too.
    """
    policy = policy_for(model.config)
    handles = []

    def on_input(module: nn.Module, layer: int, field: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda _, inputs: sink(layer, field, inputs[0])))

    def on_output(module: nn.Module, layer: int, field: str) -> None:
        def hook(_, __, output):
            # Some versions of transformers return a tuple from a decoder layer.
            sink(layer, field, output[0] if isinstance(output, tuple) else output)

        handles.append(module.register_forward_hook(hook))

    try:
        for index, layer in enumerate(policy.layers(model)):
            parts = policy.parts(layer)
            on_input(parts.q, index, "attention")
            on_input(parts.fc1, index, "mlp")
            on_input(parts.out, index, "head_outputs")
            on_input(parts.fc2, index, "activation")
            on_output(layer, index, "residual")
        yield
    finally:
        for handle in handles:
            handle.remove()


class Collector:
    """Buffers for rounds of up to `capacity` tokens of a plain HF model, or of this rank's share of the layers.

    gradients  units, of "mlp" and "heads", whose sensitivity is recorded too, by a backward pass
    units      whose outputs are recorded
    Raises ValueError for gradients of a model that is split over ranks.
    """

    def __init__(
        self,
        model: nn.Module | DenseModel,
        capacity: int,
        gradients: tuple[str, ...] = (),
        units: tuple[str, ...] = UNITS,
    ):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        dense = DenseModel.of(model)
        if gradients and dense.ranks.size > 1:
            raise ValueError("plainact takes a backward pass, which needs the model in one process: start only one")
        self._model, self._facts, self._ranks = dense.model, dense.facts, dense.ranks
        self._capacity, self._gradients, self._units = capacity, gradients, units
        self._buffers = [self._allocate(layer) for layer in range(dense.facts.num_layers)]
        self._start = 0

    @property
    def device(self) -> torch.device:
        """Of the model's first weights."""
        return self._model.device

    def _owns(self, layer: int) -> bool:
        layers = self._facts.num_layers
        return layer < layers and self._ranks.owner(layer, layers) == self._ranks.rank

    def _allocate(self, layer: int) -> LayerRecord:
        hidden, half = self._facts.hidden_size, torch.float16
        if self._model.dtype == torch.bfloat16:
            half = torch.bfloat16

        def buffer(wanted: bool, *width: int, dtype: torch.dtype = half) -> torch.Tensor | None:
            return torch.empty(self._capacity, *width, dtype=dtype, device=self._model.device) if wanted else None

        own, units = self._owns(layer), self._facts.units
        tapped = own or self._owns(layer + 1)
        return LayerRecord(
            attention=buffer(tapped, hidden),
            mlp=buffer(tapped, hidden),
            head_outputs=buffer(own and "heads" in self._units, hidden),
            activation=buffer(own and "mlp" in self._units, units["mlp"]),
            residual=buffer(True, dtype=torch.float32),
            head_sensitivity=buffer("heads" in self._gradients, units["heads"], dtype=torch.float32),
            # Gradients are small: fp16 would lose them below 6e-8.
            mlp_sensitivity=buffer("mlp" in self._gradients, units["mlp"], dtype=torch.bfloat16),
        )

    @torch.no_grad()
    def collect(self, windows: torch.Tensor) -> list[LayerRecord]:
        """Run windows [n, S] of token ids and return one record a layer of T = n * S tokens, in their order.

        The records are views of the buffers: the next call overwrites them. Of layers that this rank neither trains
        nor taps all fields but the residual are None. The model must be in eval mode.
        Raises ValueError if the windows do not fit.
        """
        if windows.numel() > self._capacity:
            raise ValueError(f"{windows.numel()} tokens do not fit buffers of {self._capacity}")
        self._start = 0
        batch = max(1, (_BACKWARD_TOKENS if self._gradients else _FORWARD_TOKENS) // windows.shape[1])
        with watching(self._model, self._store):
            for ids in windows.split(batch):
                ids = ids.to(self._model.device)
                if self._gradients:
                    self._forward_backward(ids)
                else:
                    # The decoder alone: nobody needs the logits.
                    self._model.base_model(input_ids=ids, use_cache=False)
                self._start += ids.numel()
        return [
            LayerRecord(*(None if field is None else field[: self._start] for field in vars(buffer).values()))
            for buffer in self._buffers
        ]

    @torch.enable_grad()
    def _forward_backward(self, ids: torch.Tensor) -> None:
        # The graph starts at the embeddings: the weights need no gradients.
        embeddings = self._model.get_input_embeddings()(ids).detach().requires_grad_(True)
        logits = self._model(inputs_embeds=embeddings, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
        torch.autograd.grad(loss, embeddings)

    def _store(self, layer: int, field: str, value: torch.Tensor) -> None:
        unit = {"head_outputs": "heads", "activation": "mlp"}.get(field)
        if unit is not None and unit not in self._units:
            return
        if unit in self._gradients:
            value.register_hook(lambda gradient: self._store_sensitivity(layer, unit, value.detach(), gradient))
        rows = value.detach().reshape(-1, value.shape[-1])
        if field == "residual":
            rows = rows.float().square().sum(-1)
        elif unit is not None:
            width = self._facts.units["mlp"] if unit == "mlp" else self._facts.hidden_size
            rows = self._ranks.whole(rows, width, self._ranks.owner(layer, self._facts.num_layers))
        self._write(layer, field, rows)

    def _store_sensitivity(self, layer: int, unit: str, value: torch.Tensor, gradient: torch.Tensor) -> None:
        product = (value.float() * gradient.float()).abs().flatten(0, -2)
        if unit == "heads":
            product = product.unflatten(-1, (-1, self._facts.head_dim)).sum(-1)
        self._write(layer, "head_sensitivity" if unit == "heads" else "mlp_sensitivity", product)

    def _write(self, layer: int, field: str, value: torch.Tensor | None) -> None:
        buffer = getattr(self._buffers[layer], field)
        if buffer is not None:
            buffer[self._start : self._start + len(value)] = value
