"""A model by name or folder."""

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
        ValueError: no such folder or hub model, or a family without a policy.
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
    try:
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype or "auto")
    except OSError as error:
        raise ValueError(f"the weights of {name!r} cannot be read: {_first_line(error)}") from error
    return model.eval()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
