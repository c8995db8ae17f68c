import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, check_down, make_down

from dejavu_ds.kernels import gather_down_proj as module
from dejavu_ds.kernels.gather_down_proj import gather_down_proj

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("skip_zeros", [False, True], ids=["dense", "skip"])
@pytest.mark.parametrize(
    "B, D, units, count, group",
    [
        (1, 768, 300, 45, 1),  # several splits
        (2, 100, 57, 1, 1),
        (3, 257, 33, 33, 1),  # all kept
        (5, 64, 200, 0, 1),  # none kept, several splits
        (1, 33, 40, 0, 1),  # none kept, one split
        (17, 20, 150, 70, 1),  # two tiles of tokens
        (1, 5, 3, 2, 5),  # heads of 5
        (1, 80, 1, 1, 80),  # one head
        (2, 33, 12, 7, 33),
    ],
)
def test_matches_fp64(implementation, B, D, units, count, group, skip_zeros, dtype, device):
    torch.manual_seed(0)
    case = make_down(B, D, units, count, group, skip_zeros, dtype, device)
    check_down(IMPLEMENTATIONS[implementation].gather_down_proj, case, implementation == "triton")


def test_capacity_below_the_number_of_units(implementation, device):
    torch.manual_seed(0)
    case = make_down(2, 33, 50, 7, 2, True, torch.float32, device, cap=11)
    check_down(IMPLEMENTATIONS[implementation].gather_down_proj, case, implementation == "triton")


def test_every_unit_in_order(implementation, device):
    torch.manual_seed(0)
    case = make_down(2, 33, 12, 12, 3, False, torch.float32, device)
    case["idx"] = case["idx"].sort().values
    check_down(IMPLEMENTATIONS[implementation].gather_down_proj, case, implementation == "triton")


@pytest.mark.parametrize("skip_zeros", [False, True], ids=["dense", "skip"])
def test_into_a_partial_result(implementation, skip_zeros, device):
    """In fp32 the sum is not rounded to 16 bit, so that the ranks' parts add up as one sum would."""
    torch.manual_seed(0)
    case = make_down(3, 33, 200, 120, 1, skip_zeros, torch.float16, device)
    out = torch.full((3, 33), float("nan"), device=device)
    op = IMPLEMENTATIONS[implementation].gather_down_proj
    assert op(**case, out=out) is out
    rounded = op(**case)
    if implementation == "triton":
        exact = case | {"h": case["h"].double(), "w": case["w"].double()}
        torch.testing.assert_close(
            out.double(), IMPLEMENTATIONS["torch"].gather_down_proj(**exact), rtol=1e-5, atol=1e-5
        )
    assert torch.equal(out.half(), rounded)
    with pytest.raises(ValueError, match=r"out must be \[3, 33\]"):
        gather_down_proj(**case, out=out[:2])


def test_tickets_are_left_as_they_were(device):
    torch.manual_seed(0)
    case = make_down(17, 257, 300, 120, 1, False, torch.float32, device)
    tickets = torch.zeros(100, dtype=torch.int32, device=device)
    first = gather_down_proj(**case, tickets=tickets)
    assert not tickets.any()
    assert torch.equal(gather_down_proj(**case, tickets=tickets), first)
    assert torch.equal(gather_down_proj(**case, tickets=tickets[:1]), first)  # too few: made for the call


@pytest.mark.parametrize("count", [0, 1, 9, 40])
def test_more_splits_than_there_is_work(count, device, monkeypatch):
    monkeypatch.setattr(module, "_MIN_ROWS_PER_SPLIT", 2)
    torch.manual_seed(0)
    check_down(gather_down_proj, make_down(3, 33, 40, count, 1, True, torch.float32, device), True)


def test_skipping_needs_a_zero_in_every_row(implementation, device):
    """A weight row that one token needs is read, and its infinity reaches that token."""
    case = make_down(2, 8, 4, 4, 1, False, torch.float32, device)
    case["h"][0, 1], case["h"][1, 1] = 0.0, 1.0
    case["w"][case["idx"][1].item()] = float("inf")
    case["skip_zeros"] = True
    assert IMPLEMENTATIONS[implementation].gather_down_proj(**case)[1].isinf().all()


def test_skipping_keeps_nan(implementation, device):
    case = make_down(1, 8, 4, 4, 1, True, torch.float32, device)
    case["h"][0, 2] = float("nan")
    case["w"].fill_(1.0)
    assert IMPLEMENTATIONS[implementation].gather_down_proj(**case).isnan().all()


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("h", lambda t: t.float(), TypeError, "share one dtype"),
        ("h", lambda t: t[:, :-1], ValueError, r"cap \* group = 8 \* 3 = 24 columns, got 23"),
        ("h", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
        ("h", lambda t: t[0], ValueError, r"h \[B, cap \* group\]"),
        ("w", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
        ("idx", lambda t: t.long(), TypeError, "int32"),
        ("idx", lambda t: t[:, None], ValueError, r"idx \[cap\]"),
        ("count", lambda t: t.long(), TypeError, "int32"),
        ("count", lambda t: t[0], ValueError, r"count \[1\]"),
        ("group", lambda t: 5, ValueError, "divide the 24 rows"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_down(2, 16, 8, 4, 3, False, torch.float16, device)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        gather_down_proj(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize(
    "D, units, group", [(4096, 16384, 1), (9216, 36864, 1), (4096, 32, 128), (9216, 72, 128)]
)  # fc2 and out_proj of OPT-6.7b and OPT-66b
def test_matches_fp64_at_model_size(B, D, units, group, device):
    torch.manual_seed(0)
    case = make_down(B, D, units, max(units // 10, 3), group, group == 1, torch.float16, device)
    check_down(gather_down_proj, case, True)
