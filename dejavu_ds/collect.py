"""A dense pass over text: what predictors read and what they should have said, for every layer at once.

Nothing goes to disk. One round of tokens is pushed through the model into buffers that the next round overwrites, so
memory is bounded by the capacity T of a round, whatever the length of the text. The buffers take, for L layers,

    T * L * (3 D + F) * 2 bytes

on the layers' devices: 0.3 GB for L 6, D 256, F 1024 and T 16,384, 26 GB for L 32, D 4096, F 16384.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dejavu_ds.injection_policies import policy_for
from dejavu_ds.taps import Tap

# Tokens in one forward pass: enough to keep the matrix products efficient, little beside the buffers.
_FORWARD_TOKENS = 4096


@dataclass
class LayerRecord:
    """What one layer did with T tokens. 16-bit, but for the residual.

    attention     [T, D] normalised input of the attention
    mlp           [T, D] normalised input of the MLP
    head_outputs  [T, D] heads' outputs side by side, the input of out_proj
    activation    [T, F] relu of fc1: a neuron is active iff its value is above zero
    residual      [T]    fp32, squared norm of the residual stream after the block
    """

    attention: torch.Tensor
    mlp: torch.Tensor
    head_outputs: torch.Tensor
    activation: torch.Tensor
    residual: torch.Tensor

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
            on_output(parts.attention_norm, index, "attention")
            on_output(parts.mlp_norm, index, "mlp")
            on_input(parts.out, index, "head_outputs")
            on_input(parts.fc2, index, "activation")
            on_output(layer, index, "residual")
        yield
    finally:
        for handle in handles:
            handle.remove()


class Collector:
    """Buffers for rounds of up to `capacity` tokens of a plain HF model."""

    def __init__(self, model: nn.Module, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        self._model, self._capacity = model, capacity
        policy = policy_for(model.config)
        self._buffers = [self._allocate(policy.parts(layer)) for layer in policy.layers(model)]
        self._start = 0

    def _allocate(self, parts) -> LayerRecord:
        ffn, hidden = parts.fc1.weight.shape
        device = parts.fc1.weight.device
        dtype = torch.bfloat16 if parts.fc1.weight.dtype == torch.bfloat16 else torch.float16
        return LayerRecord(
            *(torch.empty(self._capacity, n, dtype=dtype, device=device) for n in (hidden, hidden, hidden, ffn)),
            torch.empty(self._capacity, dtype=torch.float32, device=device),
        )

    @torch.no_grad()
    def collect(self, windows: torch.Tensor) -> list[LayerRecord]:
        """Run windows [n, S] of token ids and return one record a layer of T = n * S tokens, in their order.

        The records are views of the buffers: the next call overwrites them. The model must be in eval mode.
        Raises ValueError if the windows do not fit.
        """
        if windows.numel() > self._capacity:
            raise ValueError(f"{windows.numel()} tokens do not fit buffers of {self._capacity}")
        self._start = 0
        batch = max(1, _FORWARD_TOKENS // windows.shape[1])
        with watching(self._model, self._store):
            for ids in windows.split(batch):
                # The decoder alone: nobody needs the logits.
                self._model.base_model(input_ids=ids.to(self._model.device), use_cache=False)
                self._start += ids.numel()
        return [LayerRecord(*(field[: self._start] for field in vars(buffer).values())) for buffer in self._buffers]

    def _store(self, layer: int, field: str, value: torch.Tensor) -> None:
        value = value.reshape(-1, value.shape[-1])
        if field == "residual":
            value = value.float().square().sum(-1)
        getattr(self._buffers[layer], field)[self._start : self._start + len(value)] = value
