from functools import partial

import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, assert_same_bits, check_qkv, make_qkv

from dejavu_ds.kernels.configs import config_for
from dejavu_ds.kernels.gather_qkv import gather_qkv

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, H, head_dim, count, kwargs",
    [
        (1, 256, 4, 16, 2, {}),
        (2, 33, 3, 5, 3, {"bias": False}),
        (3, 64, 5, 20, 0, {}),
        (6, 33, 4, 33, 2, {"cap": 3}),  # tensor cores
        (17, 40, 3, 5, 2, {}),  # two tiles of tokens
        # Nothing missed, one token, a full run, one too long, of a head that is not kept or kept.
        (1, 64, 5, 16, 5, {"watermark": [9, 8, 5, 4, 9]}),
        (2, 33, 6, 5, 3, {"watermark": [8, 8, 6, 5, 4, 9], "bias": False}),
        (6, 33, 3, 20, 2, {"watermark": [7, 8, 9]}),
        (17, 20, 3, 5, 3, {"watermark": [7, 8, 9]}),
        (3, 33, 2, 5, 0, {"watermark": [7, 8]}),
    ],
)
def test_matches_fp64(implementation, B, D, H, head_dim, count, kwargs, dtype, device):
    torch.manual_seed(0)
    case = make_qkv(B, D, H, head_dim, count, dtype, device, **kwargs)
    check_qkv(IMPLEMENTATIONS[implementation].gather_qkv, case, implementation == "triton")


@pytest.mark.parametrize("B", [1, 6])
def test_a_program_takes_several_blocks(B, device):
    torch.manual_seed(0)
    config = config_for("gather_qkv", B, 33, torch.float32)._replace(programs=3)
    case = make_qkv(B, 33, 4, 5, 3, torch.float32, device, watermark=[7, 8, 9, 6])
    check_qkv(partial(gather_qkv, config=config), case, True)


@pytest.mark.parametrize("B", [1, 2, 6])
def test_a_late_key_has_the_bits_of_a_timely_one(B, device):
    """Computed in its own step or three steps later, whatever the number of heads around it."""
    torch.manual_seed(0)
    D, H, head_dim = 64, 4, 16
    case = make_qkv(B, D, H, head_dim, H, torch.float16, device, watermark=[6] * H, at_most=3)
    case["missed"].inputs[:] = torch.randn_like(case["missed"].inputs)
    gather_qkv(**case)
    for position in (6, 7, 8):
        x = case["missed"].inputs[:, position % 6].contiguous()
        timely = gather_qkv(x, case["w"], case["b"], case["idx"], case["count"])
        order = case["idx"].long()
        for part, name in ((1, "k_cache"), (2, "v_cache")):
            late = getattr(case["missed"], name)[:, order, position]
            assert_same_bits(late, timely[:, :, part])


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("x", lambda t: t.float(), TypeError, "share one dtype"),
        ("x", lambda t: t[:, :-1], ValueError, "one D"),
        ("w", lambda t: t.flatten(0, 2), ValueError, "one D"),
        ("b", lambda t: t[:-1], ValueError, r"b must be \[3, 3, 5\]"),
        ("idx", lambda t: t.long(), TypeError, "int32"),
        ("count", lambda t: t[0], ValueError, r"count \[1\]"),
        ("w", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), ValueError, "contiguous"),
        ("missed", lambda m: m._replace(inputs=m.inputs[:1]), ValueError, r"inputs must be \[2, R, 16\]"),
        ("missed", lambda m: m._replace(watermark=m.watermark[:-1]), ValueError, r"watermark \[3\]"),
        ("missed", lambda m: m._replace(k_cache=m.k_cache[:, :-1]), ValueError, r"must be \[2, 3, T, 5\]"),
        ("missed", lambda m: m._replace(position=m.position.long()), TypeError, "int32"),
        ("missed", lambda m: m._replace(inputs=m.inputs.float()), TypeError, "must be torch.float16"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_qkv(2, 16, 3, 5, 2, torch.float16, device, watermark=[9, 8, 7])
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        gather_qkv(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3, 8])
@pytest.mark.parametrize("D, H", [(4096, 32), (9216, 72)])  # OPT-6.7b and OPT-66b
def test_matches_fp64_at_model_size(B, D, H, device):
    torch.manual_seed(0)
    watermark = [9 - head % 5 for head in range(H)]
    check_qkv(gather_qkv, make_qkv(B, D, H, 128, H // 2, torch.float16, device, watermark=watermark), True)
