"""What `init_inference` refuses, before anything of the caller's model is replaced."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from transformers import PreTrainedModel

from dejavu_ds.block import SparseBlock
from dejavu_ds.checkpoint import refuse_quantized
from dejavu_ds.finite import finite
from dejavu_ds.injection_policies import Policy
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.quantize import QuantizeConfig, check_bitsandbytes
from dejavu_ds.selection import Selector
from dejavu_ds.taps import UNITS, Tap

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_OURS = {
    "injection_policy": "dejavu_ds chooses it by the model's family",
    "injection_policy_tuple": "dejavu_ds chooses it by the model's family",
    "replace_with_kernel_inject": "dejavu_ds brings its own blocks and kernels",
    "checkpoint": "give the model's folder or hub name in place of the model",
    "mpu": "the model is split over all processes of the job",
    "save_mp_checkpoint_path": "shards in the gather layout cannot be loaded again",
}
# Keywords of DeepSpeed's own kernels and of other model kinds: taken at their defaults, refused at other values.
_WITHOUT_EFFECT = {
    "base_dir",
    "checkpoint_config",
    "config",
    "ep_group",
    "ep_mp_group",
    "ep_size",
    "min_out_tokens",
    "moe",
    "moe_experts",
    "moe_type",
    "quant",
    "replace_method",
    "return_tuple",
    "set_empty_params",
    "training_mp_size",
    "transposed_mode",
    "triangular_masking",
    "triton_autotune",
    "use_triton",
    "zero",
}


def merge_config(config: str | dict[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's rule: config and keywords together, a key in both must agree. The caller's dict stays as it is.

    Returns:
        {DeepSpeed's name of the field, where a keyword has two: what was given}.

    Raises:
        ValueError, TypeError: by name, for a keyword that neither knows, and for one that would be taken in vain.
    """
    if isinstance(config, str | os.PathLike):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"config {str(config)!r} cannot be read as JSON: {error}") from error
    if config is not None and not isinstance(config, dict):
        raise TypeError(f"config must be a dict or the path of a JSON file, got {type(config).__name__}")
    fields = DeepSpeedInferenceConfig.model_fields
    names = {field.alias: name for name, field in fields.items() if field.alias}
    merged: dict[str, Any] = {}
    for key, value in [*(config or {}).items(), *kwargs.items()]:
        name = names.get(key, key)
        if name in merged and merged[name] != value:
            raise ValueError(f"{key} is given twice, as {merged[name]!r} and as {value!r}; give it once")
        if value == "auto" and name != "replace_method":
            raise ValueError(f"{key}='auto' would give DeepSpeed's default, whatever the model's is; leave {key} out")
        if name in _OURS and value:
            raise ValueError(f"{key} cannot be given: {_OURS[name]}")
        if name in _WITHOUT_EFFECT and value != fields[name].default:
            raise ValueError(f"{key}={value!r} would have no effect: it is for DeepSpeed's own kernels")
        if name not in _OURS:
            merged[name] = value
    if "mp_size" in merged and "tensor_parallel" in merged:
        raise ValueError("mp_size is DeepSpeed's old name of tensor_parallel={'tp_size': ...}; give one of them")
    unknown = merged.keys() - fields.keys()
    if unknown:
        raise ValueError(f"unknown keyword(s) {sorted(unknown)}; neither dejavu_ds nor deepspeed knows them")
    return merged


def check_model(model: PreTrainedModel, policy: Policy, on_meta: bool = False) -> None:
    """ValueError for a model of a known family that is not a plain one with weights and a language-model head.

    on_meta  its weights are still to be read
    """
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language-model head; load the model with AutoModelForCausalLM")
    if any(isinstance(layer, SparseBlock) for layer in policy.layers(model)):
        raise ValueError(f"this {name} is in an engine already; load the model anew for another engine")
    if any(p.is_inference() for p in model.parameters()):
        raise ValueError(f"this {name} was made under torch.inference_mode and cannot be changed; load it anew")
    refuse_quantized(model.config)
    strangers = {str(p.dtype) for p in model.parameters() if not p.is_floating_point()}
    if strangers:
        raise ValueError(f"this {name} has weights of {', '.join(sorted(strangers))}; load it in 16 or 32 bits")
    if not on_meta and any(p.is_meta for p in model.parameters()):
        raise ValueError(f"the weights of this {name} are on the meta device; load them first")


def check_dtype(dtype: torch.dtype) -> None:
    """ValueError for a dtype in which the engine does not compute."""
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype must be one of float32, float16, bfloat16, got {str(dtype).removeprefix('torch.')}; weights in "
            "4 bits are quantize='nf4'"
        )


def check_quantize(config: QuantizeConfig, dtype: torch.dtype | None) -> None:
    """ValueError where weights cannot be packed so, before a weight is read.

    dtype  of the activations; None: the model's own
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            f"quantize={config.type!r} and dtype {dtype} exclude each other: dtype is that of the activations, one of "
            "float32, float16, bfloat16"
        )
    # Before DeepSpeed has given this rank its GPU: a rank that tried on another's would take memory there.
    local_rank, accelerator = os.environ.get("LOCAL_RANK"), get_accelerator()
    device = accelerator.current_device_name() if local_rank is None else accelerator.device_name(int(local_rank))
    check_bitsandbytes(config, device, dtype or torch.float16)


def check_predictors(
    predictors: PredictorSet, of_model: dict, policy: Policy, model: PreTrainedModel, lookahead: str | None
) -> None:
    """ValueError for predictors of another model or lookahead, one that is not calibrated or not finite, or whose sizes
    are not those of the model's layer.

    of_model  the model's fingerprint
    """
    predictors.check(of_model, model.config.num_hidden_layers, lookahead)
    for i, layer in enumerate(policy.layers(model)):
        ffn, hidden = policy.parts(layer).fc1.weight.shape
        for unit, units in (("mlp", ffn), ("heads", model.config.num_attention_heads)):
            predictor = predictors.of(unit)[i]
            if predictor is None:
                continue
            sizes = predictor.w1.shape[1], predictor.units
            if sizes != (hidden, units):
                raise ValueError(
                    f"the {unit} predictor of layer {i} maps {sizes[0]} inputs to {sizes[1]} units, the model's layer "
                    f"has {hidden} and {units}; pass this model's predictors"
                )
            if predictor.quantiles is None:
                raise ValueError(f"the {unit} predictor of layer {i} is not calibrated; call its calibrate first")
            if not all(finite(p.detach()) for p in predictor.parameters()):
                raise ValueError(
                    f"the {unit} predictor of layer {i} has weights that are NaN or infinite; train it anew"
                )


def check_tensor_parallel(ds_config: DeepSpeedInferenceConfig, model_config) -> None:
    """ValueError unless the model can be split over all processes of the job."""
    asked = ds_config.tensor_parallel
    tp_size = asked.tp_size
    given = [name for name in ("mpu", "tp_group") if getattr(asked, name) is not None]
    if given:
        raise ValueError(f"tensor_parallel {given[0]} cannot be given: {_OURS['mpu']}")
    if not asked.enabled and tp_size > 1:
        raise ValueError(f"tensor_parallel is not enabled, but its tp_size is {tp_size}; leave enabled or tp_size out")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if tp_size != world:
        raise ValueError(
            f"tensor_parallel tp_size is {tp_size}, but the job has {world} process(es); start it with "
            f"`deepspeed --num_gpus {tp_size}` or set tp_size to {world}"
        )
    heads = model_config.num_attention_heads
    if heads % tp_size:
        fits = [n for n in (1, 2, 4, 8, 16) if heads % n == 0]
        raise ValueError(f"{heads} attention heads cannot be split over tp_size {tp_size}; use one of {fits}")


def check_selectors(selectors: Mapping[tuple[str, int], tuple[Selector, Tap]], blocks: Sequence[SparseBlock]) -> None:
    """ValueError for selectors that do not belong where they are put; see `DejaVuEngine.attach`."""
    places: dict[int, tuple[str, int]] = {}
    for (unit, layer), (selector, tap) in selectors.items():
        place = f"the selector of ({unit!r}, {layer})"
        if unit not in UNITS or not 0 <= layer < len(blocks):
            raise ValueError(f"{place}: units are {', '.join(UNITS)}, layers 0 to {len(blocks) - 1}")
        if id(selector) in places:
            raise ValueError(f"{place} is also that of {places[id(selector)]}: it holds one choice, make one for each")
        places[id(selector)] = unit, layer
        block = blocks[layer]
        size = block.attention.heads if unit == "heads" else block.mlp.neurons
        if selector.size != size:
            raise ValueError(f"{place} is for {selector.size} units, this rank has {size} there")
        own = Tap(layer, "attention" if unit == "heads" else "mlp")
        if not selector.of_outputs and _order(tap) > _order(own):
            raise ValueError(f"{place} listens at {tuple(tap)}, which comes after the unit has run")


def _order(tap: Tap) -> tuple[int, int]:
    return tap.layer, ("attention", "mlp").index(tap.point)
