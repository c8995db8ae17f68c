import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, assert_same_bits, check_attention, make_attention, scalar

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
        (2, 2, 300, 3, 5, 1),  # one share of many
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
    v_new = case["v_cache"][:, case["head_idx"][:2].long(), t].clone()
    out = IMPLEMENTATIONS[implementation].decode_attention(**case)
    torch.testing.assert_close(out[:, :2], v_new, rtol=1e-6, atol=0)  # a softmax weight of 1, to the last bits


def test_large_scores_do_not_overflow(implementation, device):
    torch.manual_seed(0)
    case = make_attention(1, 2, 40, 35, 32, 2, torch.float32, device)
    case["q"][:, :2] *= 1000
    check_attention(IMPLEMENTATIONS[implementation].decode_attention, case, implementation == "triton")


@pytest.fixture
def short_shares(monkeypatch):
    monkeypatch.setattr(module, "_ONE_SHARE_KEYS", 20)
    monkeypatch.setattr(module, "_BLOCK_T", {2: 16, 4: 16})
    monkeypatch.setattr(module, "_MAX_SHARES", 4)


@pytest.mark.parametrize("t", [0, 5, 20, 21, 31, 32, 33, 64, 65, 100, 129])
@pytest.mark.parametrize("programs", [1, 7, 528])
def test_shares_of_any_length(t, programs, device, monkeypatch, short_shares):
    monkeypatch.setattr(module, "_MAX_PROGRAMS", programs)
    torch.manual_seed(0)
    case = make_attention(2, 3, 130, t, 5, 2, torch.float32, device, window=6)
    check_attention(decode_attention, case, True)


@pytest.mark.parametrize("t", [7, 100])
def test_a_head_does_not_depend_on_its_neighbours(t, device, short_shares):
    """The same bits alone, in a batch, and in a longer cache."""
    torch.manual_seed(0)
    case = make_attention(3, 4, 130, t, 20, 3, torch.float16, device)
    alone = dict(case)
    for name in ("q", "k_cache", "v_cache", "key_mask"):
        alone[name] = case[name][1:2].clone()
    alone["q"] = alone["q"].roll(-2, dims=1).contiguous()
    alone["head_idx"] = case["head_idx"].roll(-2)
    alone["count"] = torch.ones_like(case["count"])
    for name in ("k_cache", "v_cache"):
        alone[name] = torch.nn.functional.pad(alone[name], (0, 0, 0, 500))
    alone["key_mask"] = torch.nn.functional.pad(alone["key_mask"], (0, 500))
    assert_same_bits(decode_attention(**alone)[0, 0], decode_attention(**case)[1, 2])


def test_too_few_tickets_are_made_for_the_call(device):
    torch.manual_seed(0)
    case = make_attention(2, 4, 160, 150, 5, 3, torch.float32, device)
    few = case["tickets"][:1]
    first, second = decode_attention(**case), decode_attention(**case | {"tickets": few})
    assert_same_bits(first[:, :3], second[:, :3])
    assert not few.any()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_moves_watermarks(implementation, count, device):
    torch.manual_seed(0)
    op = IMPLEMENTATIONS[implementation].decode_attention
    for window, t in ((1, 0), (8, 10), (8, 150)):
        case = make_attention(2, 5, 160, t, 5, count, torch.float32, device, window=window)
        check_attention(op, case, implementation == "triton")
        check_attention(op, case | {"recovered_total": None}, implementation == "triton")


def test_moves_watermarks_without_a_slot(implementation, device):
    case = make_attention(1, 3, 10, 5, 8, 0, torch.float16, device, window=4)
    case |= {"q": case["q"][:, :0], "head_idx": case["head_idx"][:0]}
    check_attention(IMPLEMENTATIONS[implementation].decode_attention, case, implementation == "triton")


def test_fewer_slots_than_heads(implementation, device):
    torch.manual_seed(0)
    case = make_attention(2, 6, 20, 9, 8, 2, torch.float32, device, cap=3)
    check_attention(IMPLEMENTATIONS[implementation].decode_attention, case, implementation == "triton")


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("q", lambda t: t.float(), TypeError, "share one dtype"),
        ("q", lambda t: t[0], ValueError, r"\[B, cap, head_dim\]"),
        ("q", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), ValueError, "contiguous"),
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
        ("mask", lambda t: t.int(), TypeError, "mask bool"),
        ("mask", lambda t: None, ValueError, r"mask \[4\]"),
        ("watermark", lambda t: t[:-1], ValueError, r"watermark \[4\]"),
        ("watermark", lambda t: t.long(), TypeError, "watermark must be int32"),
        ("watermark", lambda t: None, ValueError, "pass both or neither"),
        ("window", lambda t: 0, ValueError, "window must be at least 1"),
        ("recovered_total", lambda t: t.int(), ValueError, r"\[1\] int64"),
        ("tickets", lambda t: t.long(), TypeError, "tickets must be int32"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_attention(2, 4, 10, 5, 8, 2, torch.float16, device, window=3)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        decode_attention(**case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "B, H, t, head_dim", [(2, 32, 2000, 128), (2, 72, 2047, 128), (16, 72, 500, 64), (1, 32, 9, 80)]
)
def test_matches_fp64_at_model_size(B, H, t, head_dim, device):
    torch.manual_seed(0)
    case = make_attention(B, H, 2048, t, head_dim, H // 2, torch.float16, device, window=64)
    check_attention(decode_attention, case, True)


@pytest.mark.gpu
def test_a_captured_graph_follows_count_and_position(device):
    torch.manual_seed(0)
    case = make_attention(2, 12, 600, 599, 64, 12, torch.float16, device, holes=0.0, window=10)
    case["count"], case["position"] = count, position = scalar(2, device), scalar(400, device)
    decode_attention(**case)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode_attention(**case)
    for kept, t in ((2, 400), (12, 450), (0, 3), (1, 599), (12, 0), (5, 130)):
        count.fill_(kept)
        position.fill_(t)
        case["watermark"].copy_(t - torch.randint(0, 12, (12,)))
        eager = {name: case[name].clone() for name in ("watermark", "recovered_total")}
        expected = decode_attention(**(case | eager))
        graph.replay()
        assert_same_bits(captured[:, :kept], expected[:, :kept])
        assert torch.equal(case["watermark"], eager["watermark"])
        assert torch.equal(case["recovered_total"], eager["recovered_total"])
        assert not case["tickets"].any()
