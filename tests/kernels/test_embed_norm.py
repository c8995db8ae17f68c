import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, NAN, assert_same_bits, scalar

from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.embed_norm import embed_norm

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def op(request):
    return IMPLEMENTATIONS[request.param].embed_norm


def make(B, D, dtype, device, R=0, affine=True):
    torch.manual_seed(0)
    tokens, positions = torch.randint(0, 40, (B,)), torch.randint(-1, 20, (B,))
    token_table, position_table = torch.full((40, D), NAN), torch.full((22, D), NAN)
    token_table[tokens], position_table[positions + 2] = torch.randn(B, D), torch.randn(B, D)
    norm = [torch.randn(D).to(device, dtype) if affine else None for _ in range(2)]
    return {
        "tokens": tokens.to(device),
        "positions": positions.to(device),
        "token_table": token_table.to(device, dtype),
        "position_table": position_table.to(device, dtype),
        "offset": 2,
        "norm": Norm(*norm, 1e-5),
        "ring": torch.full((B, R, D), 7.0, dtype=dtype, device=device) if R else None,
        "position": scalar(2 * R + 1, device) if R else None,
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("B", "D", "kwargs"), [(1, 768, {}), (3, 33, {"R": 4}), (17, 64, {"affine": False, "R": 1})])
def test_matches_fp64(op, B, D, kwargs, dtype, device):
    case = make(B, D, dtype, device, **kwargs)
    hidden, x = op(**case)
    expected = case["token_table"][case["tokens"]].double() + case["position_table"][case["positions"] + 2].double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(hidden.double(), expected, rtol=eps, atol=0)  # one rounding of a sum of two
    affine = [None if t is None else t.double() for t in case["norm"][:2]]
    exact = torch.nn.functional.layer_norm(hidden.double(), (D,), *affine, 1e-5)
    torch.testing.assert_close(x.double(), exact, rtol=eps, atol=max(eps, 2e-6))
    if case["ring"] is not None:
        R = case["ring"].shape[1]
        stored = torch.full_like(case["ring"], 7.0)
        stored[:, (2 * R + 1) % R] = x
        assert_same_bits(case["ring"], stored)


@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("tokens", lambda t: t.int(), TypeError, "int64"),
        ("positions", lambda t: t[:-1], ValueError, r"must be \[B\]"),
        ("token_table", lambda t: t[:, :-1], ValueError, r"\[V, D\]"),
        ("position_table", lambda t: t.half(), TypeError, "share one dtype"),
        ("token_table", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
        ("norm", lambda n: Norm(n.weight[:-1], n.bias, n.eps), ValueError, r"must be \[16\]"),
        ("ring", lambda t: t[:1], ValueError, r"ring must be \[2, R, 16\]"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make(2, 16, torch.float32, device, R=3)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        embed_norm(**case)
