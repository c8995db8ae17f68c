"""The operations of a sparse decode step whose weights are packed in 4 bits, by device.

They take a `PackedWeight` where those of `ops` take a tensor; the operations without a large weight are those of `ops`.
A predictor has the operations of `ops`, but for the first layer of a packed one.
"""

import torch

from dejavu_ds.kernels.ops import TORCH, TRITON, Ops, ops_for
from dejavu_ds.kernels.packed_down_proj import packed_down_proj, packed_down_proj_ref
from dejavu_ds.kernels.packed_qkv import packed_qkv, packed_qkv_ref
from dejavu_ds.kernels.packed_recover_kv import packed_recover_kv, packed_recover_kv_ref
from dejavu_ds.kernels.packed_up_proj import packed_up_proj, packed_up_proj_ref

PACKED_TRITON = TRITON._replace(
    gather_down_proj=packed_down_proj,
    gather_qkv=packed_qkv,
    gather_up_proj=packed_up_proj,
    recover_kv=packed_recover_kv,
)
PACKED_TORCH = TORCH._replace(
    gather_down_proj=packed_down_proj_ref,
    gather_qkv=packed_qkv_ref,
    gather_up_proj=packed_up_proj_ref,
    recover_kv=packed_recover_kv_ref,
)


def packed_ops_for(device: torch.device | str) -> Ops:
    """Return the operations for packed weights on `device`: `PACKED_TRITON` for CUDA, `PACKED_TORCH` for CPU.

    Raises:
        ValueError: any other device.
    """
    return PACKED_TRITON if ops_for(device) is TRITON else PACKED_TORCH
