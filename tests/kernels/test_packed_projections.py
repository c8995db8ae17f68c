"""Projections over 4-bit rows against fp64 products with the rows that bitsandbytes decodes."""

import pytest
import torch
from kernel_cases import (
    DTYPES,
    NAN,
    assert_exact,
    check_down,
    check_qkv,
    check_recover,
    check_up,
    make_down,
    make_qkv,
    make_recover,
    make_up,
    randn,
)

from dejavu_ds.kernels import packed_weight
from dejavu_ds.kernels.dense import as_tensor, linear, times
from dejavu_ds.kernels.ops import ops_for
from dejavu_ds.kernels.packed_ops import packed_ops_for
from dejavu_ds.quantize import QuantizeConfig, bitsandbytes_functional, pack

pytestmark = pytest.mark.usefixtures("poison_empty")
NF4, FP4, NESTED = QuantizeConfig(), QuantizeConfig("fp4", 128), QuantizeConfig(nested=True)


@pytest.fixture(params=[2**18, 512], ids=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Elements that are decoded together."""
    monkeypatch.setattr(packed_weight, "_TILE_ELEMENTS", {})
    monkeypatch.setattr(packed_weight, "_TILE_ELEMENTS_ELSEWHERE", request.param)


def decoded(w: torch.Tensor, config: QuantizeConfig) -> torch.Tensor:
    """What bitsandbytes makes of a weight and back; a row of NaN stays one."""
    functional = bitsandbytes_functional()
    flat = w.flatten(0, -2).contiguous()
    data, state = functional.quantize_4bit(
        flat, blocksize=config.blocksize, quant_type=config.type, compress_statistics=config.nested
    )
    return functional.dequantize_4bit(data, state).view(w.shape)


def over_packed(op, case: dict, config: QuantizeConfig):
    """`op` with the case's weight packed; the case then holds the decoded weight, for the truth."""
    packed = pack(case["w"], config)
    case["w"] = decoded(case["w"], config)
    return lambda **given: op(**{**given, "w": packed})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, units, count, group, bias, relu, config",
    [
        (1, 64, 40, 11, 1, True, True, NF4),
        (3, 256, 40, 40, 1, True, False, NESTED),
        (2, 128, 9, 4, 15, False, True, FP4),
        (17, 192, 7, 0, 3, True, True, NF4),
        (2, 128, 5, 5, 8, True, False, NF4),
    ],
)
def test_up(B, D, units, count, group, bias, relu, config, dtype, device, tiles):
    torch.manual_seed(0)
    case = make_up(B, D, units, count, group, bias, relu, dtype, device)
    check_up(over_packed(packed_ops_for(device).gather_up_proj, case, config), case, rounded_once=False)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, units, count, group, skip_zeros, config",
    [
        (1, 64, 40, 23, 1, True, NF4),
        (4, 256, 40, 12, 1, True, FP4),
        (3, 256, 9, 9, 16, False, NESTED),
        (2, 128, 9, 4, 15, False, FP4),
        (6, 192, 7, 0, 1, False, NF4),
    ],
)
def test_down(B, D, units, count, group, skip_zeros, config, dtype, device, tiles):
    torch.manual_seed(0)
    case = make_down(B, D, units, count, group, skip_zeros, dtype, device)
    check_down(over_packed(packed_ops_for(device).gather_down_proj, case, config), case, rounded_once=False)


def test_down_into_an_fp32_part(device):
    """As a rank's part of a sum: the same product, written where it was asked for."""
    torch.manual_seed(0)
    case = make_down(2, 128, 20, 7, 1, False, torch.float16, device)
    op = over_packed(packed_ops_for(device).gather_down_proj, case, NF4)
    out = torch.full((2, 128), NAN, device=device)
    assert op(**case, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, op(**case).sum(0), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, H, head_dim, count, bias, config",
    [
        (1, 64, 4, 20, 3, True, NF4),
        (3, 128, 3, 16, 2, False, FP4),
        (2, 128, 3, 5, 3, True, NESTED),
        (2, 64, 3, 5, 0, True, NF4),
    ],
)
def test_qkv(B, D, H, head_dim, count, bias, config, dtype, device, tiles):
    torch.manual_seed(0)
    case = make_qkv(B, D, H, head_dim, count, dtype, device, bias=bias)
    check_qkv(over_packed(packed_ops_for(device).gather_qkv, case, config), case, rounded_once=False)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, W, D, H, head_dim, T, t, watermark, selected, bias, config",
    [
        (1, 8, 64, 3, 20, 30, 13, [10, 13, 12], [True, True, False], True, NF4),
        (2, 8, 128, 3, 5, 30, 20, [12, 12, 13], [False, True, False], True, FP4),  # two overdue, one selected
        (3, 4, 64, 1, 32, 9, 4, [0], [False], False, NF4),
    ],
)
def test_recover(B, W, D, H, head_dim, T, t, watermark, selected, bias, config, dtype, device):
    torch.manual_seed(0)
    case = make_recover(B, W, D, H, head_dim, T, t, watermark, selected, bias, dtype, device, spare=1)
    check_recover(over_packed(packed_ops_for(device).recover_kv, case, config), case, rounded_once=False)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("config", [NF4, FP4, NESTED], ids=str)
@pytest.mark.parametrize("shape", [(2, 64), (2, 3, 128), (1, 1, 256)], ids=str)
def test_every_row(shape, config, dtype, device, tiles):
    """Prefill: the whole weight, of any leading dimensions, on inputs of any."""
    torch.manual_seed(0)
    D = 256
    weight = randn(3, 2, 9, D, dtype=dtype, device=device)
    w, packed = decoded(weight, config).flatten(0, 2).double(), pack(weight, config)
    b, x, h = (randn(*size, dtype=dtype, device=device) for size in ((54,), (*shape[:-1], D), (*shape[:-1], 54)))
    exact = x.double() @ w.T + b.double()
    terms = x.double().abs() @ w.abs().T + b.double().abs()
    assert_exact(linear(x, packed, b), exact, terms, rounded_once=False)
    assert_exact(linear(x, packed), exact - b.double(), terms, rounded_once=False)
    assert_exact(times(h, pack(weight.flatten(0, 2), config)), h.double() @ w, h.double().abs() @ w.abs(), False)


def test_a_weight_in_16_bits_is_left_to_torch(device):
    w, x = torch.randn(2, 3, 8, device=device), torch.randn(4, 8, device=device)
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w.flatten(0, 1)))
    assert torch.equal(times(x, w[0].T), x @ w[0].T) and as_tensor(w) is w


def test_other_operations_are_those_of_16_bits(device):
    replaced = {"gather_down_proj", "gather_qkv", "gather_up_proj", "recover_kv"}
    packed, plain = packed_ops_for(device)._asdict(), ops_for(device)._asdict()
    assert {name for name in plain if packed[name] is not plain[name]} == replaced
    with pytest.raises(ValueError, match="meta"):
        packed_ops_for("meta")
