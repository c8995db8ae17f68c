import pytest
import torch
from kernel_cases import DTYPES, IMPLEMENTATIONS, check_predict, make_predict

from dejavu_ds.kernels import predict_select as module
from dejavu_ds.kernels.ops import TRITON
from dejavu_ds.kernels.predict_select import predict_logits_ref, predict_select

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def op(request):
    return IMPLEMENTATIONS[request.param].predict_select


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, N, r, threshold, live, bias",
    [
        (1, 1, 16, 0.0, None, True),
        (1, 8, 64, 1.0, None, False),  # a layer's heads
        (1, 64, 256, 4.0, None, True),  # a whole block
        (1, 1500, 20, 1.25, None, True),
        (1, 200, 300, 3.0, [True], True),  # two tiles over r
        (1, 70, 24, 0.0, [False], True),
        (3, 257, 33, 2.5, [True, False, True], True),
        (16, 100, 130, 4.0, None, False),
        (17, 100, 16, 4.5, None, True),  # a second tile of rows
        (2, 100, 48, -0.5, [False, False], True),  # all sequences have finished
        (2, 400, 40, -1000.0, None, True),  # all kept but NaN
        (2, 100, 40, 1000.0, None, True),  # none
        (40, 33, 16, 5.0, [b % 2 == 0 for b in range(40)], True),
    ],
)
def test_keeps_the_units_above_the_threshold(op, B, N, r, threshold, live, bias, dtype, device):
    torch.manual_seed(0)
    check_predict(op, make_predict(B, N, r, threshold, live, bias, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("B, N, r", [(1, 40, 48), (1, 300, 256), (1, 100, 300), (4, 130, 40), (17, 64, 16)])
def test_weights_in_8_bits(op, B, N, r, dtype, device):
    """A scale a row, powers of 2 so that sums are the same in any order."""
    torch.manual_seed(0)
    case = make_predict(B, N, r, 2.0, None, True, dtype, device)
    case["w2"] = torch.randint(-127, 128, (N, r), dtype=torch.int8, device=device)
    case["scale"] = 2.0 ** torch.randint(-9, -4, (N,), device=device).float()
    check_predict(op, case)


@pytest.mark.parametrize(
    "scale, w2",
    [(torch.ones(7), torch.int8), (torch.ones(8, dtype=torch.float16), torch.int8), (torch.ones(8), torch.float16)],
)
def test_a_scale_that_does_not_fit(scale, w2, device):
    case = make_predict(1, 8, 16, 0.0, None, False, torch.float16, device)
    case |= {"w2": torch.zeros(8, 16, dtype=w2, device=device), "scale": scale.to(device)}
    with pytest.raises(ValueError, match=r"a scale must be \[8\] fp32, for w2 in int8"):
        predict_select(**case)


def test_lists_units_over_many_steps(op, device, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_N", 16)
    monkeypatch.setattr(module, "_LIST_BLOCKS", 2)
    torch.manual_seed(0)
    check_predict(op, make_predict(3, 333, 20, 1.0, [True, True, False], True, torch.float16, device))


@pytest.mark.parametrize("B, dtype", [(1, torch.float16), (1, torch.float32), (4, torch.bfloat16), (4, torch.float32)])
def test_matches_fp64(op, B, dtype, device):
    """Any numbers: the sets may differ from fp64's only where a logit is within rounding of the threshold."""
    torch.manual_seed(0)
    N, r, threshold = 500, 1000, 0.6
    case = make_predict(B, N, r, threshold, None, True, dtype, device)
    case["z"] = torch.randn(B, r).relu().to(device, dtype)
    case["w2"] = (torch.randn(N, r) / r**0.5).to(device, dtype)
    op(**case)
    z, w2, b2 = (case[name].double() for name in ("z", "w2", "b2"))
    exact, terms = z @ w2.T + b2, z @ w2.abs().T + b2.abs()
    near = (exact - threshold).abs() <= 8 * torch.finfo(torch.float32).eps * terms
    assert not near.any(dim=0).all()
    assert torch.equal(case["mask_out"] | near.any(dim=0), (exact > threshold).any(dim=0) | near.any(dim=0))
    error = (predict_logits_ref(case["z"], case["w2"], case["b2"]).double() - exact).abs()
    assert (error <= 8 * torch.finfo(torch.float32).eps * terms).all()


def test_sums_in_fp32(op, device):
    """2048 + 1 is 2048 in fp16, the threshold lies between the two."""
    case = make_predict(1, 2, 16, 2048.5, None, False, torch.float16, device)
    case["z"].fill_(1)
    case["w2"].zero_()
    case["w2"][:, 0] = 2048
    case["w2"][1, 1] = 1
    op(**case)
    assert case["idx_out"][: case["count_out"].item()].tolist() == [1]


def test_compares_in_fp32(op, device):
    """A threshold that fp32 rounds keeps out the logit that is the same number in fp32."""
    case = make_predict(1, 4, 16, 0.1, None, False, torch.float32, device)
    case["z"].zero_()
    case["z"][0, 3] = 1
    case["w2"].fill_(0.1)
    op(**case)
    assert case["count_out"].item() == 0


@pytest.mark.parametrize("B", [1, 3])
def test_a_logit_does_not_depend_on_the_other_units(B, device):
    """Equal rows share their fate even where the last bit decides it, whatever part of them a rank holds."""
    torch.manual_seed(0)
    for r in (24, 100, 256):
        z, row = torch.randn(B, r).relu().to(device, torch.float16), torch.randn(r).to(device, torch.float16)
        threshold = (z.double() @ row.double()).max().item()
        fates = set()
        for N in (1, 8, 63, 64, 1000):
            case = make_predict(B, N, r, threshold, None, False, torch.float16, device)
            predict_select(**(case | {"z": z, "w2": row.expand(N, r).contiguous()}))
            fates.add(case["count_out"].item() / N)
        assert fates in ({0.0}, {1.0})


@pytest.mark.parametrize(
    "name, change, error, match",
    [
        ("z", lambda t: t.int(), TypeError, "share one dtype"),
        ("z", lambda t: t[0], ValueError, r"z \[B, r\]"),
        ("z", lambda t: t[:, :-1], ValueError, r"w2 \[N, r\]"),
        ("z", lambda t: t.T.contiguous().T, ValueError, "unit stride"),
        ("w2", lambda t: t.float(), TypeError, "share one dtype"),
        ("w2", lambda t: t.T.contiguous().T, ValueError, "contiguous"),
        ("w2", lambda t: torch.cat([t[:1], t])[1:], ValueError, "16-byte boundary"),
        ("b2", lambda t: t[:-1], ValueError, r"b2 must be \[8\]"),
        ("b2", lambda t: t.float(), TypeError, "share one dtype"),
        ("idx_out", lambda t: t.long(), TypeError, "int32"),
        ("idx_out", lambda t: t[:-1], ValueError, r"idx_out \[8\]"),
        ("count_out", lambda t: t.long(), TypeError, "int32"),
        ("mask_out", lambda t: t.int(), TypeError, "bool"),
        ("live", lambda t: t.int(), ValueError, r"live must be \[2\] bool"),
        ("live", lambda t: t[:1], ValueError, r"live must be \[2\]"),
        ("kept_total", lambda t: t.int(), ValueError, r"kept_total must be \[1\] int64"),
        ("tickets", lambda t: t.long(), ValueError, "tickets must be one int32"),
    ],
)
def test_rejects(name, change, error, match, device):
    case = make_predict(2, 8, 20, 0.0, [True, True], True, torch.float16, device)
    case[name] = change(case[name])
    with pytest.raises(error, match=match):
        predict_select(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 4, 16])
@pytest.mark.parametrize("N, r", [(16384, 128), (28672, 256), (36864, 1000)])
def test_keeps_the_units_above_the_threshold_at_model_size(N, r, B, device):
    torch.manual_seed(0)
    live = [b % 3 != 1 for b in range(B)]
    check_predict(predict_select, make_predict(B, N, r, 12.0, live, True, torch.float16, device))


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 4])
def test_a_captured_graph_follows_its_input(B, device):
    torch.manual_seed(0)
    case = make_predict(B, 5000, 64, 4.0, None, True, torch.float16, device)
    TRITON.predict_select(**case)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        TRITON.predict_select(**case)
    for _ in range(5):
        case["z"].copy_(torch.randint(0, 3, case["z"].shape))
        before = case["kept_total"].item()
        graph.replay()
        replayed = case["mask_out"].clone(), case["idx_out"][: case["count_out"].item()].clone()
        assert case["kept_total"].item() == before + replayed[0].sum().item()
        check_predict(TRITON.predict_select, case)
        assert torch.equal(replayed[0], case["mask_out"])
        assert torch.equal(replayed[1], case["idx_out"][: case["count_out"].item()])
