"""One file a model family: which layer is replaced, where its tensors are, what is row-parallel.

To support another family, add a file with a class like `OPTPolicy` and name it in `_POLICIES`.
"""

from dejavu_ds.injection_policies.base import BlockParts, Policy
from dejavu_ds.injection_policies.opt import OPTPolicy

__all__ = ["BlockParts", "Policy", "policy_for"]

_POLICIES: dict[str, Policy] = {policy.model_type: policy for policy in (OPTPolicy(),)}


def policy_for(config) -> Policy:
    """The policy for a Hugging Face configuration; ValueError for a family or a variant without one."""
    model_type = getattr(config, "model_type", None)
    if model_type not in _POLICIES:
        raise ValueError(
            f"no injection policy for model type {model_type!r}; supported: {', '.join(sorted(_POLICIES))}. "
            "A new family is one file in injection_policies/"
        )
    policy = _POLICIES[model_type]
    policy.check(config)
    return policy
