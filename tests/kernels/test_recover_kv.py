import pytest
import torch
from kernel_cases import (
    DTYPES,
    IMPLEMENTATIONS,
    assert_exact,
    assert_same_bits,
    check_recover,
    make_recover,
    scalar,
)

from dejavu_ds.kernels import recover_kv as module
from dejavu_ds.kernels.recover_kv import recover_kv

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, W, D, H, head_dim, T, t, watermark, selected, bias",
    [
        (1, 8, 100, 3, 20, 30, 13, [10, 13, 12], [True, True, False], True),
        (2, 8, 33, 3, 5, 30, 20, [12, 12, 13], [False, True, False], True),  # two overdue, one of them selected
        (3, 4, 64, 1, 32, 9, 4, [0], [False], False),  # the whole ring
        (5, 16, 20, 3, 5, 40, 31, [20, 31, 29], [True, False, True], True),  # the ring wraps
        (1, 8, 257, 1, 33, 10, 5, [5], [True], True),  # nothing missing
        (2, 8, 33, 3, 5, 30, 20, [15, 13, 20], [False, False, True], True),  # nothing due
        (2, 8, 33, 3, 5, 30, 20, [19, 19, 13], [True, False, False], False),  # one token missed
        (17, 3, 20, 2, 5, 10, 6, [5, 4], [True, False], True),
        (3, 40, 24, 2, 20, 60, 50, [10, 25], [False, True], True),  # many items, in two tiles
        (1, 4, 768, 2, 8, 6, 2, [1, 1], [False, True], True),
    ],
)
def test_matches_fp64(implementation, B, W, D, H, head_dim, T, t, watermark, selected, bias, dtype, device):
    torch.manual_seed(0)
    case = make_recover(B, W, D, H, head_dim, T, t, watermark, selected, bias, dtype, device)
    check_recover(IMPLEMENTATIONS[implementation].recover_kv, case, implementation == "triton")


@pytest.mark.parametrize("spare", [1, 3])
def test_runs_of_every_length(implementation, spare, device):
    """Up to the window, of heads selected or not, in a ring that just has room for the window and t, or more."""
    torch.manual_seed(0)
    t, W = 30, 8
    watermark = [t - missing for missing in range(W + 1) for _ in (0, 1)]
    sizes = 2, W, 20, len(watermark), 5, 40, t, watermark, [True, False] * (W + 1)
    case = make_recover(*sizes, True, torch.float32, device, spare=spare)
    check_recover(IMPLEMENTATIONS[implementation].recover_kv, case, implementation == "triton")


@pytest.mark.parametrize("programs", [1, 5])
def test_few_programs_see_to_many_heads(programs, device, monkeypatch):
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    torch.manual_seed(0)
    case = make_recover(
        2, 4, 20, 7, 5, 20, 9, [5, 6, 9, 7, 5, 8, 9], [h % 2 == 0 for h in range(7)], True, torch.float16, device
    )
    check_recover(recover_kv, case, True)


@pytest.mark.parametrize("few", [1, 6, 1000])
def test_few_items_and_many(few, device, monkeypatch):
    """Heads of both kinds of tiles in one launch, and all of one kind; a run as long as the limit, and one longer."""
    monkeypatch.setattr(module, "_FEW", few)
    torch.manual_seed(0)
    watermark, selected = [29, 28, 27, 26, 10, 30, 28], [True] * 6 + [False]
    case = make_recover(2, 20, 300, 7, 12, 40, 30, watermark, selected, True, torch.float32, device)
    check_recover(recover_kv, case, True)


@pytest.mark.parametrize("spare", [1, 2])
def test_heads_that_take_turns_have_all_keys(implementation, spare, device):
    """Two sets of heads alternate and one head is never selected; at each step what a selected head attends to
    equals computing its keys and values at every position."""
    torch.manual_seed(0)
    ops = IMPLEMENTATIONS[implementation]
    B, W, D, H, head_dim, steps = 2, 6, 12, 5, 2, 40
    x = torch.randn(steps, B, D, device=device)
    w, b = torch.randn(H, 3, head_dim, D, device=device) / D**0.5, torch.randn(H, 3, head_dim, device=device)
    every = torch.einsum("tbd,hcnd->cbhtn", x.double(), w.double()) + b.double().permute(1, 0, 2)[:, None, :, None]
    terms = torch.einsum("tbd,hcnd->cbhtn", x.double().abs(), w.double().abs()) + b.double().abs().max()
    ring = torch.full((B, W + spare, D), float("nan"), device=device)
    k_cache = torch.full((B, H, steps, head_dim), float("nan"), device=device)
    v_cache = k_cache.clone()
    key_mask = torch.ones(B, steps, dtype=torch.bool, device=device)
    watermark = torch.zeros(H, dtype=torch.int32, device=device)
    recovered, recovered_total = 0, torch.zeros(1, dtype=torch.int64, device=device)
    for t in range(steps):
        position = scalar(t, device)
        heads = [0, 1] if t % 5 < 3 else [2, 3]
        selected = torch.zeros(H, dtype=torch.bool, device=device)
        selected[heads] = True
        head_idx = torch.tensor([*heads, 4, -1, 2**30], dtype=torch.int32, device=device)
        count = scalar(2, device)
        ring[:, t % (W + spare)] = x[t]
        before = k_cache.isnan().sum((0, 2, 3))
        ops.recover_kv(ring, w, b, selected, watermark, position, k_cache, v_cache, W)
        recovered += int(((k_cache.isnan().sum((0, 2, 3)) < before) & ~selected).sum())
        q_now = ops.gather_qkv(x[t], w, b, head_idx, count, k_cache, v_cache, position, watermark)
        caches = k_cache, v_cache, head_idx, count, position, key_mask
        moved = {"mask": selected, "watermark": watermark, "window": W, "recovered_total": recovered_total}
        out = ops.decode_attention(q_now, *caches, 1.0, **moved)
        q, k, v = every[0, :, heads, t], every[1, :, heads, : t + 1], every[2, :, heads, : t + 1]
        exact = ((k @ q[..., None]).squeeze(-1).softmax(-1)[:, :, None] @ v).squeeze(2)
        torch.testing.assert_close(out[:, :2].double(), exact, rtol=1e-4, atol=1e-5)
    assert recovered_total.item() == recovered > 0
    for head, end in enumerate(watermark.tolist()):
        assert end > steps - 1 - W
        assert_exact(k_cache[:, head, :end], every[1, :, head, :end], terms[1, :, head, :end], False)
        assert_exact(v_cache[:, head, :end], every[2, :, head, :end], terms[2, :, head, :end], False)


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("inputs", lambda t: t.float(), TypeError, "share one dtype"),
        ("inputs", lambda t: t[0], ValueError, r"\[B, R, D\]"),
        ("inputs", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), ValueError, "contiguous"),
        ("w", lambda t: t[..., :-1], ValueError, r"w must be \[H, 3, head_dim, 16\]"),
        ("b", lambda t: t[:-1], ValueError, r"b must be \[3, 3, 8\]"),
        ("b", lambda t: t.float(), TypeError, "share one dtype"),
        ("selected", lambda t: t.int(), TypeError, "selected must be bool"),
        ("watermark", lambda t: t.long(), TypeError, "int32"),
        ("watermark", lambda t: t[:-1], ValueError, r"watermark \[3\]"),
        ("position", lambda t: t.long(), TypeError, "int32"),
        ("k_cache", lambda t: t[:, :-1], ValueError, "k_cache and v_cache"),
        ("window", lambda t: 5, ValueError, r"window must lie in 1..4"),
        ("v_cache", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "contiguous"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_recover(2, 4, 16, 3, 8, 10, 5, [4, 3, 2], [True, True, False], True, torch.float16, device)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        recover_kv(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("D, H", [(4096, 32), (9216, 72), (2560, 32)])
def test_matches_fp64_at_model_size(D, H, device):
    torch.manual_seed(0)
    t, W = 2000, 64
    watermark = [t - W if h % 16 == 0 else t - h % 5 for h in range(H)]
    selected = [h % 2 == 0 for h in range(H)]
    case = make_recover(2, W, D, H, 128, 2048, t, watermark, selected, True, torch.float16, device, 1)
    check_recover(recover_kv, case, True)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_watermarks(device):
    torch.manual_seed(0)
    B, W, D, H, head_dim, T = 2, 16, 256, 8, 64, 200
    case = make_recover(B, W, D, H, head_dim, T, 100, [84] * H, [True] * H, True, torch.float16, device, 1)
    case["inputs"].normal_()  # any position may be asked for
    recover_kv(**case)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recover_kv(**case)
    for t in (0, 5, 100, 150):
        case["position"].fill_(t)
        case["watermark"].copy_((t - torch.randint(0, W + 1, (H,))).clamp(min=0))
        case["selected"].copy_(torch.rand(H) < 0.5)
        caches = {name: case[name].fill_(float("nan")).clone() for name in ("k_cache", "v_cache")}
        recover_kv(**(case | caches))
        graph.replay()
        for name, eager in caches.items():
            assert_same_bits(case[name], eager)
