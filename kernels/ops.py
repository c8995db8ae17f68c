"""The operations of a sparse decode step, by device: Triton kernels on CUDA, their torch references on CPU.

Both sets take the same arguments and mean the same; each operation is described in the module of its name.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dejavu_ds.kernels.add_norm import add_norm, add_norm_ref
from dejavu_ds.kernels.decode_attention import decode_attention, decode_attention_ref
from dejavu_ds.kernels.embed_norm import embed_norm, embed_norm_ref
from dejavu_ds.kernels.gather_down_proj import gather_down_proj, gather_down_proj_ref
from dejavu_ds.kernels.gather_qkv import gather_qkv, gather_qkv_ref
from dejavu_ds.kernels.gather_up_proj import gather_up_proj, gather_up_proj_ref
from dejavu_ds.kernels.predict_select import predict_select, predict_select_ref
from dejavu_ds.kernels.recover_kv import recover_kv, recover_kv_ref


class Ops(NamedTuple):
    """One implementation of every operation of a sparse decode step."""

    add_norm: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]
    embed_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gather_down_proj: Callable[..., torch.Tensor]
    gather_qkv: Callable[..., torch.Tensor]
    gather_up_proj: Callable[..., torch.Tensor]
    predict_select: Callable[..., None]
    recover_kv: Callable[..., None]


TRITON = Ops(
    add_norm, decode_attention, embed_norm, gather_down_proj, gather_qkv, gather_up_proj, predict_select, recover_kv
)
TORCH = Ops(
    add_norm_ref,
    decode_attention_ref,
    embed_norm_ref,
    gather_down_proj_ref,
    gather_qkv_ref,
    gather_up_proj_ref,
    predict_select_ref,
    recover_kv_ref,
)


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
