"""The operations of a sparse decode step whose weights are packed in 4 bits, by device.

They take a `PackedWeight` where those of `ops` take a tensor; the operations without a large weight are those of `ops`.
Predictors are not packed and keep the operations of `ops`.
"""

import torch

from dejavu_ds.kernels.ops import Ops, ops_for
from dejavu_ds.kernels.packed_down_proj import packed_down_proj_ref
from dejavu_ds.kernels.packed_qkv import packed_qkv_ref
from dejavu_ds.kernels.packed_recover_kv import packed_recover_kv_ref
from dejavu_ds.kernels.packed_up_proj import packed_up_proj_ref

CAPTURABLE = False
"""Whether a CUDA graph can hold a step of these operations: the torch twins read counts on the host."""


def packed_ops_for(device: torch.device | str) -> Ops:
    """Return the operations for packed weights on `device`, "cuda" or "cpu": projections by their torch twins on both.

    Raises:
        ValueError: any other device.
    """
    return ops_for(device)._replace(
        gather_down_proj=packed_down_proj_ref,
        gather_qkv=packed_qkv_ref,
        gather_up_proj=packed_up_proj_ref,
        recover_kv=packed_recover_kv_ref,
    )
