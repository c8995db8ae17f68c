import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, check_select, make_select

from dejavu_ds.kernels import select as module
from dejavu_ds.kernels.select import select

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def op(request):
    return IMPLEMENTATIONS[request.param].select


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, N, threshold, live",
    [
        (1, 1, 0.0, None),
        (1, 1024, 1.0, None),  # a whole block
        (1, 5001, 1.25, None),  # blocks before and after a recount stride
        (3, 257, 0.5, [True, False, True]),
        (17, 100, 1.5, None),
        (2, 100, -0.5, [False, False]),  # all sequences have finished
        (2, 2049, -100.0, None),  # all kept but NaN
        (2, 100, 100.0, None),  # none
        (64, 33, 2.0, [b % 2 == 0 for b in range(64)]),
    ],
)
def test_keeps_the_units_above_the_threshold(op, B, N, threshold, live, dtype, device):
    torch.manual_seed(0)
    check_select(op, make_select(B, N, threshold, live, dtype, device))


def test_recounts_over_many_blocks(op, device, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_N", 16)
    monkeypatch.setattr(module, "_BLOCK_RECOUNT", 32)
    torch.manual_seed(0)
    check_select(op, make_select(3, 333, 0.5, [True, True, False], torch.float16, device))


def test_compares_in_fp32(op, device):
    """A threshold that fp32 rounds keeps out the logit that is the same number in fp32."""
    case = make_select(1, 4, 0.0, None, torch.float32, device)
    case["logits"].fill_(0.1)
    case["threshold"] = 0.1
    op(**case)
    assert case["count_out"].item() == 0


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("logits", lambda t: t.int(), TypeError, "float32, float16 or bfloat16"),
        ("logits", lambda t: t[0], ValueError, r"\[B, N\]"),
        ("logits", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
        ("idx_out", lambda t: t.long(), TypeError, "int32"),
        ("idx_out", lambda t: t[:-1], ValueError, r"idx_out \[8\]"),
        ("count_out", lambda t: t.long(), TypeError, "int32"),
        ("mask_out", lambda t: t.int(), TypeError, "bool"),
        ("live", lambda t: t.int(), TypeError, "bool"),
        ("live", lambda t: t[:1], ValueError, r"live must be \[2\]"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_select(2, 8, 0.0, [True, True], torch.float16, device)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        select(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [16384, 36864, 50000])
def test_keeps_the_units_above_the_threshold_at_model_size(N, device):
    torch.manual_seed(0)
    check_select(select, make_select(4, N, 1.0, [True, False, True, True], torch.float16, device))
