"""The operations of a sparse decode step, by device: Triton kernels on CUDA, their torch references on CPU.

Both sets take the same arguments and mean the same; each operation is described in the module of its name.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dejavu_ds.kernels.decode_attention import decode_attention, decode_attention_ref
from dejavu_ds.kernels.gather_down_proj import gather_down_proj, gather_down_proj_ref
from dejavu_ds.kernels.gather_up_proj import gather_up_proj, gather_up_proj_ref
from dejavu_ds.kernels.predict_select import predict_select, predict_select_ref
from dejavu_ds.kernels.recover_kv import recover_kv, recover_kv_ref


class Ops(NamedTuple):
    """One implementation of every operation of a sparse decode step."""

    predict_select: Callable[..., None]
    gather_up_proj: Callable[..., torch.Tensor]
    gather_down_proj: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]
    recover_kv: Callable[..., None]


TRITON = Ops(predict_select, gather_up_proj, gather_down_proj, decode_attention, recover_kv)
TORCH = Ops(predict_select_ref, gather_up_proj_ref, gather_down_proj_ref, decode_attention_ref, recover_kv_ref)


def ops_for(device: torch.device | str) -> Ops:
    """Return the operations for tensors on `device`: `TRITON` for CUDA, `TORCH` for CPU.

    Raises:
        ValueError: any other device.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return TRITON
    if kind == "cpu":
        return TORCH
    raise ValueError(f"sparse decoding runs on cuda or cpu, got {str(device)!r}: move the model to one of them")
