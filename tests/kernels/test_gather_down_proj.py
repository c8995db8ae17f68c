from functools import partial

import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, check_beyond, check_down, make_down

from dejavu_ds.kernels import gather_down_proj as module
from dejavu_ds.kernels.configs import Config, token_block
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
        (1, 768, 300, 45, 1),
        (2, 100, 57, 1, 1),
        (3, 257, 33, 33, 1),  # all kept
        (1, 33, 700, 650, 1),  # several steps
        (5, 64, 300, 270, 1),
        (5, 64, 200, 0, 1),  # none kept
        (1, 33, 40, 0, 1),
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


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("skip_zeros", [False, True], ids=["dense", "skip"])
def test_into_a_partial_result(implementation, skip_zeros, parts, device):
    """Into memory that ranks share, in as many parts as that has."""
    torch.manual_seed(0)
    case = make_down(3, 33, 600, 420, 1, skip_zeros, torch.float16, device)
    op = IMPLEMENTATIONS[implementation].gather_down_proj

    def into(**case):
        out = torch.full((parts, 3, 33), float("nan"), device=device)
        y = op(**case, out=out)
        assert y.shape == out.shape and y.data_ptr() == out.data_ptr()
        return y

    check_down(into, case, implementation == "triton")
    for wrong in ((3, 33), (1, 2, 33), (0, 3, 33)):
        with pytest.raises(ValueError, match=r"out must be \[S, 3, 33\]"):
            gather_down_proj(**case, out=torch.zeros(wrong, device=device))
    with pytest.raises(TypeError, match="out must be float32"):
        gather_down_proj(**case, out=torch.zeros(1, 3, 33, dtype=torch.float16, device=device))


def small(B, block_n=16, block_d=16, warps=1):
    """Of few rows, so that small cases take several steps."""
    block_b, dot = token_block(B)
    return Config(block_b, block_n, block_d, dot, stages=3 if dot else 1, warps=warps)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("skip_zeros", [False, True], ids=["dense", "skip"])
@pytest.mark.parametrize("B", [1, 2, 3, 4, 5, 16, 17])
def test_several_steps(B, skip_zeros, dtype, device):
    """None, up to four of 16 rows, the last one full, nearly so, or of a single row."""
    torch.manual_seed(0)
    for count in (0, 1, 15, 16, 17, 32, 33, 48, 50):
        case = make_down(B, 33, 50, count, 1, skip_zeros, dtype, device)
        check_down(partial(gather_down_proj, config=small(B)), case, True)


# Widths that a block covers, divides, and leaves a rest of; rows that are summed at once fewer than a step's, as many,
# and a single one.
@pytest.mark.parametrize("D", [5, 33, 64, 100])
@pytest.mark.parametrize("block_n, block_d, warps", [(16, 16, 1), (64, 16, 4), (32, 32, 1), (16, 512, 1)])
@pytest.mark.parametrize("B", [1, 3, 6])
def test_any_block_sizes(B, block_n, block_d, warps, D, device):
    torch.manual_seed(0)
    config = small(B, block_n, block_d, warps)
    for group, units, count, dtype in ((1, 90, 70, torch.float16), (33, 3, 2, torch.float32)):
        case = make_down(B, D, units, count, group, group == 1, dtype, device)
        check_down(partial(gather_down_proj, config=config), case, True)


@pytest.mark.parametrize("block_b, B", [(1, 3), (2, 5), (4, 1), (4, 17), (2, 1)])
def test_any_tile_of_tokens(block_b, B, device):
    """The last tile of tokens need not be full."""
    torch.manual_seed(0)
    for skip_zeros in (False, True):
        case = make_down(B, 33, 50, 37, 1, skip_zeros, torch.float32, device)
        check_down(partial(gather_down_proj, config=Config(block_b, 16, 16, warps=1)), case, True)


@pytest.mark.parametrize("skip_zeros", [False, True], ids=["dense", "skip"])
@pytest.mark.parametrize("B", [1, 3, 6])
@pytest.mark.parametrize("group, cap, counts", [(1, 60, (0, 1, 15, 16, 17, 32)), (6, 11, (0, 1, 8))])
def test_what_stands_beyond_the_count(group, cap, counts, B, skip_zeros, device):
    """Units and elements of h are loaded steps ahead, and at first before the count is known."""
    torch.manual_seed(0)
    for count in counts:
        case = make_down(B, 33, 70, count, group, skip_zeros, torch.float16, device, cap=cap)
        check_beyond(partial(gather_down_proj, config=small(B)), case, lambda y: y)
    check_beyond(gather_down_proj, case, lambda y: y)


@pytest.mark.parametrize("B, tiles", [(1, 1), (3, 1), (17, 2)])
@pytest.mark.parametrize("group, cap", [(1, 60), (6, 10)])
@pytest.mark.parametrize("wanted", [3, 8])
def test_shares(wanted, group, cap, B, tiles, device, monkeypatch):
    """Of no row, fewer rows than shares, a number that they divide and one that they do not; across units' bounds."""
    monkeypatch.setattr(module, "_LEAST_ROWS", 4)
    torch.manual_seed(0)
    strips = 3
    config = small(B)._replace(programs=wanted * strips * tiles)
    for count in (0, 1, 4, 7, cap):
        case = make_down(B, 33, 70, count, group, group == 1, torch.float32, device, cap=cap)
        assert len(gather_down_proj(**case, config=config)) == wanted
        check_down(partial(gather_down_proj, config=config), case, True)


@pytest.mark.parametrize(
    "cap, programs, shares",
    [
        (1000, 10**6, 8),  # as many as add_norm reads
        (200, 10**6, 3),  # of 64 rows at least
        (10, 10**6, 1),
        (1000, 5, 5),
        (1000, 0, 1),
    ],
)
def test_the_number_of_shares_follows_from_the_shapes(cap, programs, shares, device):
    torch.manual_seed(0)
    config = Config(1, 64, 64, programs=programs)
    for count in (0, 9):
        case = make_down(1, 33, 1000, count, 1, False, torch.float16, device, cap=cap)
        assert gather_down_proj(**case, config=config).shape == (shares, 1, 33)


def test_skipping_needs_a_zero_in_every_row(implementation, device):
    """A weight row that one token needs is read, and its infinity reaches that token."""
    case = make_down(2, 8, 4, 4, 1, False, torch.float32, device)
    case["h"][0, 1], case["h"][1, 1] = 0.0, 1.0
    case["w"][case["idx"][1].item()] = float("inf")
    case["skip_zeros"] = True
    assert IMPLEMENTATIONS[implementation].gather_down_proj(**case).sum(0)[1].isinf().all()


def test_skipping_keeps_nan(implementation, device):
    case = make_down(1, 8, 4, 4, 1, True, torch.float32, device)
    case["h"][0, 2] = float("nan")
    case["w"].fill_(1.0)
    assert IMPLEMENTATIONS[implementation].gather_down_proj(**case).sum(0).isnan().all()


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
@pytest.mark.parametrize("B", [1, 3, 8])
@pytest.mark.parametrize(
    "D, units, group", [(4096, 16384, 1), (9216, 36864, 1), (4096, 32, 128), (9216, 72, 128)]
)  # fc2 and out_proj of OPT-6.7b and OPT-66b
def test_matches_fp64_at_model_size(B, D, units, group, device):
    torch.manual_seed(0)
    case = make_down(B, D, units, max(units // 10, 3), group, group == 1, torch.float16, device)
    check_down(gather_down_proj, case, True)
