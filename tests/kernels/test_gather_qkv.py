from functools import partial

import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, assert_same_bits, check_beyond, check_qkv, make_qkv, scalar

from dejavu_ds.kernels.configs import Config, config_for
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
        (1, 20, 6, 5, 6, {}),  # all kept
        (4, 100, 3, 16, 1, {"bias": False}),
        (5, 20, 3, 20, 0, {"cap": 1}),
        (1, 64, 5, 16, 4, {"late": [0, 2, 4]}),  # some of the kept heads have missed steps
        (3, 40, 4, 5, 4, {"late": [1], "bias": False}),
        (6, 33, 4, 20, 3, {"late": [0, 1, 2, 3], "t": 6}),
        (17, 40, 3, 5, 2, {"late": [0, 2]}),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_matches_fp64(implementation, B, D, H, head_dim, count, kwargs, ahead, dtype, device):
    torch.manual_seed(0)
    case = make_qkv(B, D, H, head_dim, count, dtype, device, **kwargs)
    check_qkv(partial(IMPLEMENTATIONS[implementation].gather_qkv, ahead=ahead), case, implementation == "triton")


# Blocks of a single row, of some of a head's, and of more than it has; rows in one step, and in several with a rest.
@pytest.mark.parametrize("block_n, block_d, programs", [(1, 64, 3), (2, 16, 1), (2, 16, 100), (8, 8, 5)])
@pytest.mark.parametrize("B", [1, 2, 3, 4, 6, 17])
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_any_block_sizes(B, block_n, block_d, programs, ahead, device):
    torch.manual_seed(0)
    config = config_for("gather_qkv", B, 33, torch.float32)
    if config.dot:
        block_n, block_d = max(block_n, 16), max(block_d, 16)
    config = config._replace(block_n=block_n, block_d=block_d, programs=programs)
    for count, late in ((0, ()), (1, ()), (3, ()), (3, (0, 2))):
        case = make_qkv(B, 33, 4, 5, count, torch.float32, device, late=late)
        check_qkv(partial(gather_qkv, config=config, ahead=ahead), case, True)


def test_small_blocks_of_many_tokens(device):
    torch.manual_seed(0)
    case = make_qkv(5, 33, 4, 5, 3, torch.float16, device)
    check_qkv(partial(gather_qkv, config=Config(2, 2, 16, programs=3)), case, True)


@pytest.mark.parametrize("programs", [1, 4, 100])
@pytest.mark.parametrize("B", [2, 6])
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_what_stands_beyond_the_count(B, programs, ahead, device):
    """The head of a block is loaded before it is known whether there is such a block."""
    torch.manual_seed(0)
    config = config_for("gather_qkv", B, 33, torch.float16)._replace(programs=programs)
    for count in (0, 1, 3):
        case = make_qkv(B, 33, 5, 5, count, torch.float16, device, cap=4)
        check_beyond(partial(gather_qkv, config=config, ahead=ahead), case, lambda q, count=count: q[:, :count])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("B", [1, 2, 6])
def test_a_head_does_not_depend_on_its_neighbours(B, dtype, device):
    """The same bits alone and among others, wherever in the list, so that a selection changes no other head."""
    torch.manual_seed(0)
    case = make_qkv(B, 64, 4, 16, 4, dtype, device)
    among_others = gather_qkv(**case)
    for slot in range(4):
        alone = case | {"idx": case["idx"].roll(-slot), "count": scalar(1, device)}
        assert_same_bits(gather_qkv(**alone)[:, 0], among_others[:, slot])


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
        ("k_cache", lambda t: t[:, :-1], ValueError, "k_cache and v_cache"),
        ("v_cache", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "contiguous"),
        ("position", lambda t: t[0], ValueError, r"position \[1\]"),
        ("position", lambda t: t.long(), TypeError, "int32"),
        ("watermark", lambda t: t[:-1], ValueError, r"watermark \[3\]"),
        ("watermark", lambda t: t.long(), TypeError, "int32"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_qkv(2, 16, 3, 5, 2, torch.float16, device, late=[1])
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        gather_qkv(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3, 8])
@pytest.mark.parametrize("D, H", [(4096, 32), (9216, 72)])  # OPT-6.7b and OPT-66b
def test_matches_fp64_at_model_size(B, D, H, device):
    torch.manual_seed(0)
    check_qkv(gather_qkv, make_qkv(B, D, H, 128, H // 2, torch.float16, device, late=range(0, H, 3)), True)
