import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, assert_same_bits, scalar

from dejavu_ds.kernels.add_norm import Norm, add_norm

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def op(request):
    return IMPLEMENTATIONS[request.param].add_norm


def make(B, D, dtype, device, y=True, bias=True, affine=True, R=0, parts=0):
    torch.manual_seed(0)

    def tensor(*shape):
        return torch.randn(*shape).to(device, dtype)

    # A stream with a large mean and an outlier, as the ones of trained models.
    hidden = tensor(B, D) + 3
    hidden[:, 0] = 40
    norm = Norm(tensor(D) if affine else None, tensor(D) if affine else None, 1e-5)
    return {
        "y": tensor(parts, B, D).float() if parts else tensor(B, D) if y else None,
        "bias": tensor(D) if bias else None,
        "hidden": hidden,
        "norm": norm,
        "ring": torch.full((B, R, D), 7.0, dtype=dtype, device=device) if R else None,
        "position": scalar(2 * R + 1, device) if R else None,
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, kwargs",
    [
        (1, 768, {}),
        (3, 33, {"R": 4}),
        (5, 20, {"y": False, "bias": False}),
        (17, 64, {"bias": False, "R": 1}),
        (2, 100, {"affine": False}),
        (1, 33, {"parts": 1}),
        (3, 40, {"parts": 8, "bias": False}),
    ],
)
def test_matches_fp64(op, B, D, kwargs, dtype, device):
    case = make(B, D, dtype, device, **kwargs)
    before = case["hidden"].double()
    for part in (case["y"], case["bias"]):
        before = before if part is None else before + (part.double().sum(0) if part.dim() == 3 else part.double())
    x = op(**case)
    hidden = case["hidden"]
    eps = torch.finfo(dtype).eps
    # One rounding by the kernel; torch rounds after each of two additions.
    torch.testing.assert_close(hidden.double(), before, rtol=2 * eps, atol=4 * eps)
    weight, bias, epsilon = case["norm"]
    affine = [None if t is None else t.double() for t in (weight, bias)]
    exact = torch.nn.functional.layer_norm(hidden.double(), (D,), *affine, epsilon)
    # One rounding of a result of the order of 1, and fp32 statistics of a stream of the order of 40.
    torch.testing.assert_close(x.double(), exact, rtol=eps, atol=max(eps, 2e-5))
    if case["ring"] is not None:
        R = case["ring"].shape[1]
        expected = torch.full_like(case["ring"], 7.0)
        expected[:, (2 * R + 1) % R] = x
        assert_same_bits(case["ring"], expected)


def test_without_a_norm_the_stream_is_returned(op, device):
    case = make(2, 33, torch.float32, device)
    expected = case["hidden"] + case["y"] + case["bias"]
    x = op(**case | {"norm": None})
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
    assert_same_bits(x, case["hidden"])


@pytest.mark.parametrize("norm", [True, False])
def test_moves_the_position_on(op, norm, device):
    case = make(3, 33, torch.float32, device)
    moves = scalar(2**30, device), torch.tensor([5, 0, -1], device=device)
    x = op(**case | ({} if norm else {"norm": None}), moves=moves)
    assert moves[0].tolist() == [2**30 + 1] and moves[1].tolist() == [6, 1, 0]
    assert_same_bits(x, op(**make(3, 33, torch.float32, device) | ({} if norm else {"norm": None})))
    with pytest.raises(ValueError, match=r"moves must be \[1\] int32 and \[3\] int64"):
        add_norm(**case, moves=moves[::-1])


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("y", lambda t: t[:, :-1], ValueError, r"y must be \[2, 16\]"),
        ("hidden", lambda t: t[0], ValueError, r"hidden must be \[B, D\]"),
        ("bias", lambda t: t[:-1], ValueError, r"must be \[16\]"),
        ("norm", lambda t: Norm(t.weight[:-1], t.bias, t.eps), ValueError, r"must be \[16\]"),
        ("y", lambda t: t.half(), TypeError, "or fp32"),
        ("bias", lambda t: t.half(), TypeError, "share one dtype"),
        ("ring", lambda t: t[:1], ValueError, r"ring must be \[2, R, 16\]"),
        ("position", lambda t: None, ValueError, "takes position"),
        ("hidden", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make(2, 16, torch.float32, device, R=3)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        add_norm(**case)
