"""Deja Vu contextual sparsity as a DeepSpeed inference engine.

`init_inference` stands in for `deepspeed.init_inference`; the engine it returns decodes OPT models by reading only the
attention heads and MLP neurons that small predictors choose for each token.
"""

import os

# In a checkout that is not installed, or installed with links in place of folders, the sub-packages `kernels`,
# `injection_policies` and `launch` lie beside this folder and not inside it.
_root = os.path.dirname(__path__[0])
if os.path.isdir(os.path.join(_root, "injection_policies")) and _root not in __path__:
    __path__.append(_root)
del _root, os

from dejavu_ds.config import SparsityConfig  # noqa: E402
from dejavu_ds.engine import DejaVuEngine, init_inference  # noqa: E402
from dejavu_ds.predictor import PredictorSet  # noqa: E402

__all__ = ["DejaVuEngine", "PredictorSet", "SparsityConfig", "init_inference"]
__version__ = "0.1.0"
