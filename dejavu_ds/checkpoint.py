"""A model by name or folder."""

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dejavu_ds.injection_policies import policy_for


def bundled_model() -> Path:
    """Folder of the trained 7 M OPT that comes with the package; its predictors are in `predictors/` inside."""
    return Path(__file__).parent / "models" / "opt-7m"


def load_model(name: str | os.PathLike, dtype: torch.dtype | None) -> PreTrainedModel:
    """An OPT from a folder or from the hub, in eval mode on the CPU.

    The family is checked on the configuration, before any weight is read.

    Args:
        dtype: None takes the checkpoint's own.

    Raises:
        ValueError: no such folder or hub model, a family without a policy, or weights that are quantised.
    """
    name = os.fspath(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no model at {name!r}: give a folder with config.json and weights, or a hub name such as "
            f"facebook/opt-1.3b ({_first_line(error)})"
        ) from error
    policy_for(config)
    refuse_quantized(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype or "auto")
    except OSError as error:
        raise ValueError(f"the weights of {name!r} cannot be read: {_first_line(error)}") from error
    return model.eval()


def refuse_quantized(config: PretrainedConfig) -> None:
    """ValueError for the configuration of a model whose weights are quantised already.

    bitsandbytes packs a linear's weight [out, in] along `in`. For q, k, v and fc1 that is the gather layout; out_proj
    and fc2 lie transposed there, and a block of theirs would spread over 64 rows. To decode and pack them again the
    other way round rounds twice: a third model, neither the checkpoint nor what `quantize` makes of the original.
    """
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method")
    method = getattr(method, "value", method)
    reason = "only weights of 16 or 32 bits are taken"
    if method == "bitsandbytes" and quantization.get("load_in_4bit"):
        reason = (
            "sparse steps pick single columns of out_proj and fc2, whose blocks run across the columns there, and to "
            "pack them anew would make another model"
        )
    raise ValueError(
        f"the weights of {config._name_or_path or 'this model'} are quantised already, by {method}: {reason}. Load the "
        "checkpoint in 16 bits, and give quantize='nf4' or 'fp4' to have it packed"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
