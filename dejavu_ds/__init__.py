"""Deja Vu contextual sparsity as a DeepSpeed inference engine.

`init_inference` stands in for `deepspeed.init_inference`; the engine it returns decodes OPT models by reading only the
attention heads and MLP neurons that small predictors choose for each token.
"""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dejavu_ds.config import SparsityConfig
    from dejavu_ds.engine import DejaVuEngine, init_inference
    from dejavu_ds.predictor import PredictorSet
    from dejavu_ds.quantize import QuantizeConfig

__all__ = ["DejaVuEngine", "PredictorSet", "QuantizeConfig", "SparsityConfig", "init_inference"]
__version__ = "0.1.0"

# In a checkout that is not installed, or installed with links in place of folders, the sub-packages `kernels`,
# `injection_policies` and `launch` lie beside this folder and not inside it.
_root = os.path.dirname(__path__[0])
if os.path.isdir(os.path.join(_root, "injection_policies")):
    __path__.append(_root)

_MODULES = {
    "DejaVuEngine": "engine",
    "PredictorSet": "predictor",
    "QuantizeConfig": "quantize",
    "SparsityConfig": "config",
    "init_inference": "engine",
}


def __getattr__(name: str):
    # Only when asked for: importing DeepSpeed takes seconds, and neither the kernels nor a --help need it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
