import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, check_attention, make_attention

from dejavu_ds.kernels import decode_attention as module
from dejavu_ds.kernels.decode_attention import decode_attention

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, H, T, t, head_dim, count",
    [
        (1, 12, 40, 31, 64, 5),
        (1, 1, 9, 0, 5, 1),  # the first token: no key in the cache
        (2, 3, 70, 69, 20, 3),  # the last slot, all heads
        (3, 3, 33, 32, 33, 2),  # one whole tile of keys
        (5, 3, 20, 1, 80, 1),
        (2, 3, 20, 10, 32, 0),  # no head
        (1, 3, 50, 40, 128, 2),
        (17, 3, 12, 7, 5, 1),
        (1, 3, 400, 390, 20, 2),  # several shares of the context
        (2, 2, 300, 3, 5, 1),  # most shares empty
    ],
)
def test_matches_fp64(implementation, B, H, T, t, head_dim, count, dtype, device):
    torch.manual_seed(0)
    case = make_attention(B, H, T, t, head_dim, count, dtype, device)
    check_attention(IMPLEMENTATIONS[implementation].decode_attention, case, implementation == "triton")


@pytest.mark.parametrize("T, t", [(20, 15), (400, 290)])
def test_every_key_masked_but_the_new_one(implementation, T, t, device):
    """What a left-padded row sees at its first token; the answer is the new value itself."""
    torch.manual_seed(0)
    case = make_attention(2, 3, T, t, 20, 2, torch.float32, device, holes=1.1)
    v_new = case["qkv"][:, :2, 2].clone()
    out = IMPLEMENTATIONS[implementation].decode_attention(**case)
    torch.testing.assert_close(out[:, :2], v_new, rtol=1e-6, atol=0)  # a softmax weight of 1, to the last bits


def test_large_scores_do_not_overflow(implementation, device):
    torch.manual_seed(0)
    case = make_attention(1, 2, 40, 35, 32, 2, torch.float32, device)
    case["qkv"][:, :2, 0] *= 1000
    check_attention(IMPLEMENTATIONS[implementation].decode_attention, case, implementation == "triton")


@pytest.mark.parametrize("t", [0, 5, 31, 32, 33, 100, 129])
def test_shares_of_any_length(t, device, monkeypatch):
    monkeypatch.setattr(module, "_ONE_SPLIT_T", 0)
    monkeypatch.setattr(module, "_KEYS_PER_SPLIT", 48)
    torch.manual_seed(0)
    check_attention(decode_attention, make_attention(2, 3, 130, t, 5, 2, torch.float32, device), True)


def test_fewer_slots_than_heads(implementation, device):
    torch.manual_seed(0)
    case = make_attention(2, 6, 20, 9, 8, 2, torch.float32, device, cap=3)
    check_attention(IMPLEMENTATIONS[implementation].decode_attention, case, implementation == "triton")


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("qkv", lambda t: t.float(), TypeError, "share one dtype"),
        ("qkv", lambda t: t[:, :, :2], ValueError, r"\[B, cap, 3, head_dim\]"),
        ("qkv", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), ValueError, "contiguous"),
        ("k_cache", lambda t: t[:, :, :-1], ValueError, "k_cache and v_cache"),
        ("k_cache", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "contiguous"),
        ("v_cache", lambda t: t[..., :-1], ValueError, "k_cache and v_cache"),
        ("head_idx", lambda t: t.long(), TypeError, "int32"),
        ("head_idx", lambda t: t[:-1], ValueError, r"head_idx \[4\]"),
        ("count", lambda t: t.long(), TypeError, "int32"),
        ("position", lambda t: t.long(), TypeError, "int32"),
        ("position", lambda t: t[0], ValueError, r"position \[1\]"),
        ("key_mask", lambda t: t.int(), TypeError, "bool"),
        ("key_mask", lambda t: t[:, :-1], ValueError, r"key_mask must be \[2, 10\]"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_attention(2, 4, 10, 5, 8, 2, torch.float16, device)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        decode_attention(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("H, t", [(32, 2000), (72, 2047), (72, 500)])
def test_matches_fp64_at_model_size(H, t, device):
    torch.manual_seed(0)
    check_attention(decode_attention, make_attention(2, H, 2048, t, 128, H // 2, torch.float16, device), True)
