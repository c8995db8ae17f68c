"""A plain model with units masked at every position: what sparsity would do, at dense cost and without an engine.

Every token has its own selection; keys and values are those of all heads. This is the setting in which Deja Vu
(arXiv:2310.17157) measures accuracy, and budgets are found in it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from dejavu_ds.injection_policies import policy_for
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.taps import UNITS, Tap, tap_of

_FORWARD_TOKENS = 2048


@contextmanager
def masking(model: nn.Module, predictors: PredictorSet, densities: dict[str, float]) -> Iterator[None]:
    """Inside, forward passes of a plain HF model drop what `predictors` do not select at mean `densities`.

    densities  {"mlp": mean, "heads": mean}; 1.0 leaves the unit dense.
    Predictors are used on the device and in the dtype of their weights, so move them to the model's first.
    """
    policy = policy_for(model.config)
    head_dim = policy.head_dim(model.config)
    layers = policy.layers(model)
    taps: dict[Tap, torch.Tensor] = {}
    handles = []

    def remember(module: nn.Module, tap: Tap) -> None:
        handles.append(module.register_forward_pre_hook(lambda _, inputs: taps.__setitem__(tap, inputs[0])))

    def mask(module: nn.Module, predictor, threshold: float, tap: Tap, group: int) -> None:
        def hook(_, inputs):
            keep = predictor.logits(taps[tap].to(predictor.w1.dtype)) > threshold
            return (inputs[0] * keep.repeat_interleave(group, -1).view(inputs[0].shape),)

        handles.append(module.register_forward_pre_hook(hook))

    try:
        for index, layer in enumerate(layers):
            parts = policy.parts(layer)
            remember(parts.q, Tap(index, "attention"))
            remember(parts.fc1, Tap(index, "mlp"))
        for unit in UNITS:
            for index, density in enumerate(predictors.densities(unit, densities[unit])):
                if density == 1:
                    continue
                predictor, parts = predictors.of(unit)[index], policy.parts(layers[index])
                module, group = (parts.fc2, 1) if unit == "mlp" else (parts.out, head_dim)
                tap = tap_of(unit, index, predictors.lookahead)
                mask(module, predictor, predictor.threshold(density), tap, group)
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def text_perplexity(model: nn.Module, windows: torch.Tensor) -> float:
    """Perplexity of a plain HF model on windows [n, S] of token ids; all tokens but each window's first count."""
    total = torch.zeros((), dtype=torch.float64)
    for ids in windows.split(max(1, _FORWARD_TOKENS // windows.shape[1])):
        ids = ids.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
        total += loss.double().cpu()
    return math.exp(total.item() / (windows.shape[0] * (windows.shape[1] - 1)))
