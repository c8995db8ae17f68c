"""A predictor with weights of few bits, for models in 4 bits, beside which one of 16 bits is a good part of a step."""

import torch
import torch.nn.functional as F
from torch import nn

from dejavu_ds.kernels.dense import linear
from dejavu_ds.predictor import Predictor
from dejavu_ds.quantize import QuantizeConfig, bitsandbytes_functional, pack

_LARGEST = 127


class PackedPredictor(nn.Module):
    """logits = relu(x w1^T + b1) (w2 * w2_scale)^T + b2, made of a `Predictor`, whose thresholds stay as they are.

    The first layer is packed as the blocks' weights are. The rows of the second, as long as the rank, need be no whole
    blocks, so they are in 8 bits, each with a scale of its own: bitsandbytes' vector-wise quantiser. A row's bits
    depend on no other row, hence not on how many ranks share the units.

    Shapes (D hidden, r rank, N units of this rank):
        w1 [r, D] packed, b1 [r], w2 [N, r] int8, w2_scale [N] fp32, b2 [N]

    Raises:
        ValueError: D is no multiple of the blocksize, or bitsandbytes is missing.
    """

    def __init__(self, predictor: Predictor, config: QuantizeConfig) -> None:
        super().__init__()
        self.w1 = pack(predictor.w1, config)
        # On a GPU bitsandbytes takes fp16 alone.
        rows = predictor.w2.detach().half()
        absmax = rows.abs().amax(1)
        # It divides by the largest of a row. A row of zeros, which a rank without units may have none of, stays zero.
        values = bitsandbytes_functional().int8_vectorwise_quant(rows)[0] if len(rows) else rows.to(torch.int8)
        values.masked_fill_((absmax == 0)[:, None], 0)
        self.register_buffer("w2", values)
        self.register_buffer("w2_scale", absmax.float() / _LARGEST)
        self.register_buffer("b1", predictor.b1.detach())
        self.register_buffer("b2", predictor.b2.detach())

    @property
    def rank(self) -> int:
        return self.w2.shape[1]

    @property
    def units(self) -> int:
        return self.w2.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a choice reads."""
        return self.w1.nbytes + sum(b.nbytes for b in (self.w2, self.w2_scale, self.b1, self.b2))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., N] in fp32."""
        z = torch.relu(linear(x, self.w1, self.b1))
        return F.linear(z.float(), self.w2.float()) * self.w2_scale + self.b2.float()
