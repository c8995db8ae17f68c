"""Which model a predictor set belongs to: its sizes and a few of its weights.

Predictors of another checkpoint load and run without any error and give nonsense, even if the sizes agree.
A sample of weights tells two checkpoints apart; it is compared with a tolerance, so that the same checkpoint
in fp32, fp16 or bf16 is recognised.
"""

import os
from collections.abc import Callable

import torch

from dejavu_ds.injection_policies import policy_for

CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "ffn_dim",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "do_layer_norm_before",
    "activation_function",
    "word_embed_proj_dim",
)
_SAMPLED_PARTS = ("attention_norm", "q", "fc1", "fc2")
_SAMPLES = 8
# bf16 keeps 8 bits: its rounding moves a value by at most 2^-9 of itself.
_TOLERANCE = 2**-7


def fingerprint(model: torch.nn.Module, read_weight: Callable[[str], torch.Tensor] | None = None) -> dict:
    """Return a JSON-able description of a plain, unsharded HF model.

    Keys: `name` (last component of its name or path, for messages only), `config` (its structural numbers) and
    `weights` ({"<layer>.<part>": 8 values spread over the weight} for the first, middle and last block).
    `read_weight(parameter name)` gives the weights of a model built on the meta device, from its checkpoint say.
    Raises ValueError if the weights are on the meta device and `read_weight` is not given.
    """
    policy = policy_for(model.config)
    layers = policy.layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    read_weight = read_weight or model.get_parameter
    weights = {}
    for layer in sorted({0, len(layers) // 2, len(layers) - 1}):
        parts = policy.parts(layers[layer])
        for part in _SAMPLED_PARTS:
            module = getattr(parts, part)
            if getattr(module, "weight", None) is not None:  # a layer norm may have none
                weights[f"{layer}.{part}"] = _sample(read_weight(f"{names[id(module)]}.weight"))
    return {
        "name": os.path.basename(os.path.normpath(model.config._name_or_path or "unnamed")),
        "config": {field: getattr(model.config, field, None) for field in CONFIG_FIELDS},
        "weights": weights,
    }


def check_fingerprint(expected: dict, actual: dict) -> None:
    """Raise ValueError unless both fingerprints are of one model; names and dtypes may differ.

    `expected` is what the predictors were trained for, `actual` the model at hand.
    """
    differences = [
        f"{field} {expected['config'].get(field)} against {actual['config'].get(field)}"
        for field in CONFIG_FIELDS
        if expected["config"].get(field) != actual["config"].get(field)
    ]
    if not differences:
        differences = _weight_differences(expected["weights"], actual["weights"])
    if differences:
        raise ValueError(
            f"these predictors were trained for {expected['name']!r}, the model is {actual['name']!r}: they differ in "
            f"{'; '.join(differences)}. Pass this model's predictors, or train some with launch/train_predictors.py"
        )


def _weight_differences(expected: dict, actual: dict) -> list[str]:
    wrong = sorted(expected.keys() ^ actual.keys())
    for name in expected.keys() & actual.keys():
        scale = max(abs(value) for value in expected[name])
        pairs = zip(expected[name], actual[name], strict=True)
        # Written so that a NaN counts as different.
        if not all(abs(a - b) <= _TOLERANCE * scale for a, b in pairs):
            wrong.append(name)
    return [f"the weights of {', '.join(sorted(wrong))} (sizes are equal)"] if wrong else []


def _sample(weight: torch.Tensor) -> list[float]:
    """Values along the diagonal, so that neither one row nor one column decides."""
    if weight.is_meta:
        raise ValueError(
            "the model's weights are on the meta device: load them before taking its fingerprint, or pass read_weight"
        )
    index = tuple(torch.arange(_SAMPLES, device=weight.device) * size // _SAMPLES for size in weight.shape)
    return [float(f"{value:.5g}") for value in weight.detach()[index].float().tolist()]
