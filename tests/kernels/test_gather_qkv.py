import copy
from functools import partial

import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, NAN, assert_exact, assert_same_bits, pick, randn, scalar

from dejavu_ds.kernels.configs import rows_config
from dejavu_ds.kernels.gather_qkv import Missed, gather_qkv

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def make(B, D, H, head_dim, count, dtype, device, bias=True, cap=None, watermark=None, t=9, R=6, T=12, at_most=4):
    """`watermark` [H]: runs of up to `at_most` missed tokens are due for kept heads."""
    idx, kept = pick(H, cap or H, count)
    w, b = torch.randn(H, 3, head_dim, D) / D**0.5, torch.randn(H, 3, head_dim)
    w[~kept], b[~kept] = NAN, NAN
    missed = None
    if watermark is not None:
        inputs = torch.full((B, R, D), NAN)
        for head, first in enumerate(watermark):
            if kept[head] and 0 < t - first <= at_most:
                inputs[:, torch.arange(first, t) % R] = torch.randn(B, t - first, D)
        cache = torch.full((B, H, T, head_dim), NAN).to(device, dtype)
        low = torch.tensor(watermark, dtype=torch.int32, device=device)
        missed = Missed(inputs.to(device, dtype), low, scalar(t, device), cache, cache.clone(), at_most)
    return {
        "x": randn(B, D, dtype=dtype, device=device),
        "w": w.to(device, dtype),
        "b": b.to(device, dtype) if bias else None,
        "idx": idx.to(device),
        "count": scalar(count, device),
        "missed": missed,
    }


def check(op, case, rounded_once):
    count = int(case["count"])
    heads = case["idx"][:count].long()
    first, second = copy.deepcopy(case), copy.deepcopy(case)
    qkv, again = op(**first), op(**second)
    B, head_dim = case["x"].shape[0], case["w"].shape[2]
    assert qkv.shape == (B, case["idx"].numel(), 3, head_dim) and qkv.dtype == case["x"].dtype

    def truth(x, heads):
        """[B, ..., heads, 3, head_dim] of x [B, ..., D], and the terms."""
        x, w = x.double(), case["w"][heads].double()
        exact = torch.einsum("...d,hprd->...hpr", x, w)
        terms = torch.einsum("...d,hprd->...hpr", x.abs(), w.abs())
        if case["b"] is None:
            return exact, terms
        b = case["b"][heads].double()
        return exact + b, terms + b.abs()

    assert_exact(qkv[:, :count], *truth(case["x"], heads), rounded_once)
    assert_same_bits(qkv[:, :count], again[:, :count])
    if case["missed"] is None:
        return
    before, after = case["missed"], first["missed"]
    assert torch.equal(after.watermark, before.watermark)
    t, R = int(before.position), before.inputs.shape[1]
    for part, name in ((1, "k_cache"), (2, "v_cache")):
        stored = getattr(after, name)
        assert_same_bits(stored, getattr(second["missed"], name))
        rest = stored.clone()
        for head in heads.tolist():
            low = int(before.watermark[head])
            if not 0 < t - low <= before.at_most:
                continue
            x = before.inputs[:, torch.arange(low, t, device=rest.device) % R]
            exact, terms = truth(x, torch.tensor([head], device=rest.device))
            assert_exact(stored[:, head, low:t], exact[:, :, 0, part], terms[:, :, 0, part], rounded_once)
            rest[:, head, low:t] = getattr(before, name)[:, head, low:t]
        assert_same_bits(rest, getattr(before, name))


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
    case = make(B, D, H, head_dim, count, dtype, device, **kwargs)
    check(IMPLEMENTATIONS[implementation].gather_qkv, case, implementation == "triton")


@pytest.mark.parametrize("B", [1, 6])
def test_a_program_takes_several_blocks(B, device):
    torch.manual_seed(0)
    config = rows_config("gather_qkv", B, 33, torch.float32)._replace(programs=3)
    case = make(B, 33, 4, 5, 3, torch.float32, device, watermark=[7, 8, 9, 6])
    check(partial(gather_qkv, config=config), case, True)


@pytest.mark.parametrize("B", [1, 2, 6])
def test_a_late_key_has_the_bits_of_a_timely_one(B, device):
    """Computed in its own step or three steps later, whatever the number of heads around it."""
    torch.manual_seed(0)
    D, H, head_dim = 64, 4, 16
    case = make(B, D, H, head_dim, H, torch.float16, device, watermark=[6] * H, at_most=3)
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
    case = make(2, 16, 3, 5, 2, torch.float16, device, watermark=[9, 8, 7])
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        gather_qkv(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3, 8])
@pytest.mark.parametrize("D, H", [(4096, 32), (9216, 72)])  # OPT-6.7b and OPT-66b
def test_matches_fp64_at_model_size(B, D, H, device):
    torch.manual_seed(0)
    watermark = [9 - head % 5 for head in range(H)]
    check(gather_qkv, make(B, D, H, 128, H // 2, torch.float16, device, watermark=watermark), True)
