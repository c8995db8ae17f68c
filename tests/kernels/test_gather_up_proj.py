from functools import partial

import pytest
import torch
from helpers import assert_as_accurate
from kernel_cases import DTYPES, IMPLEMENTATIONS, check_beyond, check_up, make_up

from dejavu_ds.kernels.configs import config_for
from dejavu_ds.kernels.gather_up_proj import gather_up_proj

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, units, count, group, bias, relu",
    [
        (1, 768, 96, 14, 1, True, True),
        (2, 100, 57, 1, 1, True, True),
        (3, 257, 33, 33, 1, False, True),  # all kept
        (5, 64, 40, 0, 1, True, True),  # none kept
        (17, 20, 31, 9, 1, True, False),  # two tiles of tokens
        (1, 5, 3, 2, 3 * 5, True, False),  # heads of 5
        (1, 80, 1, 1, 3 * 20, True, False),  # one head
        (2, 33, 3, 3, 3 * 33, False, False),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_matches_fp64(implementation, B, D, units, count, group, bias, relu, ahead, dtype, device):
    torch.manual_seed(0)
    case = make_up(B, D, units, count, group, bias, relu, dtype, device)
    check_up(partial(IMPLEMENTATIONS[implementation].gather_up_proj, ahead=ahead), case, implementation == "triton")


def test_capacity_below_the_number_of_units(implementation, device):
    torch.manual_seed(0)
    case = make_up(2, 33, 50, 7, 2, True, True, torch.float32, device, cap=11)
    check_up(IMPLEMENTATIONS[implementation].gather_up_proj, case, implementation == "triton")


def test_every_unit_in_order(implementation, device):
    torch.manual_seed(0)
    case = make_up(2, 33, 12, 12, 3, True, False, torch.float32, device)
    case["idx"] = case["idx"].sort().values
    check_up(IMPLEMENTATIONS[implementation].gather_up_proj, case, implementation == "triton")


@pytest.mark.parametrize("B", [2, 6])
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_a_program_takes_several_blocks(B, ahead, device):
    torch.manual_seed(0)
    config = config_for("gather_up_proj", B, 33, torch.float32)._replace(programs=3)
    case = make_up(B, 33, 120, 103, 1, True, True, torch.float32, device)
    check_up(partial(gather_up_proj, config=config, ahead=ahead), case, True)


@pytest.mark.parametrize("programs", [1, 3, 100])
@pytest.mark.parametrize("B", [2, 6])
@pytest.mark.parametrize("group, cap, counts", [(1, 40, (0, 1, 4, 5, 32)), (6, 8, (0, 1, 3))])
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_what_stands_beyond_the_count(group, cap, counts, B, programs, ahead, device):
    """The units of a block are loaded before it is known whether there is such a block."""
    torch.manual_seed(0)
    config = config_for("gather_up_proj", B, 33, torch.float16)._replace(programs=programs)
    for count in counts:
        case = make_up(B, 33, 50, count, group, True, True, torch.float16, device, cap=cap)
        check_beyond(partial(gather_up_proj, config=config, ahead=ahead), case, lambda y, end=count * group: y[:, :end])


def test_relu_keeps_nan(implementation, device):
    """A NaN in a kept weight is an error upstream and must be seen, not clipped to zero."""
    case = make_up(1, 8, 4, 4, 1, True, True, torch.float32, device)
    case["x"][0, 0] = float("nan")
    assert IMPLEMENTATIONS[implementation].gather_up_proj(**case).isnan().all()


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("x", lambda t: t.float(), TypeError, "share one dtype"),
        ("b", lambda t: t.float(), TypeError, "share one dtype"),
        ("x", lambda t: t[:, :-1], ValueError, "one D"),
        ("x", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
        ("w", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
        ("b", lambda t: t[:-1], ValueError, r"b must be \[24\]"),
        ("idx", lambda t: t.long(), TypeError, "int32"),
        ("idx", lambda t: t[:, None], ValueError, r"idx \[cap\]"),
        ("count", lambda t: t.long(), TypeError, "int32"),
        ("count", lambda t: t[0], ValueError, r"count \[1\]"),
        ("group", lambda t: 5, ValueError, "divide the 24 rows"),
        ("group", lambda t: 0, ValueError, "divide the 24 rows"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_up(2, 16, 8, 4, 3, True, False, torch.float16, device)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        gather_up_proj(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize(
    "D, units, group", [(4096, 16384, 1), (9216, 36864, 1), (4096, 32, 384), (9216, 72, 384)]
)  # fc1 and qkv of OPT-6.7b and OPT-66b
def test_matches_fp64_at_model_size(B, D, units, group, device):
    torch.manual_seed(0)
    count = max(units // 10, 3)
    case = make_up(B, D, units, count, group, True, group == 1, torch.float16, device)
    check_up(gather_up_proj, case, True)
    kept = slice(0, count * group)
    in_torch = IMPLEMENTATIONS["torch"].gather_up_proj
    exact = in_torch(**{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in case.items()})
    assert_as_accurate(gather_up_proj(**case)[:, kept], in_torch(**case)[:, kept], exact[:, kept])
