import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import IMPLEMENTATIONS, NAN, make_attention, make_down, make_qkv, make_up, scalar

from dejavu_ds.kernels.add_norm import Norm
from dejavu_ds.kernels.ops import TORCH, TRITON, ops_for

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return IMPLEMENTATIONS[request.param]


def test_ops_for_a_device():
    assert ops_for("cpu") is TORCH and ops_for(torch.device("cpu")) is TORCH
    assert ops_for("cuda") is TRITON and ops_for(torch.device("cuda", 1)) is TRITON
    with pytest.raises(ValueError, match="cuda or cpu"):
        ops_for("meta")


def test_import_needs_no_driver():
    """Without a GPU and outside the interpreter, importing the kernels must work; only launching them needs one."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", "import dejavu_ds.kernels.ops"], check=True, env=env)


def test_keeping_the_active_neurons_is_the_dense_mlp(ops, device):
    """The chain of a sparse MLP on oracle logits: ReLU makes every neuron left out an exact zero."""
    torch.manual_seed(0)
    B, D, F = 3, 33, 90
    x = torch.randn(B, D, device=device)
    fc1, bias, fc2 = torch.randn(F, D, device=device), torch.randn(F, device=device), torch.randn(F, D, device=device)
    logits = x @ fc1.T + bias  # of a predictor whose first layer is the identity
    dense = torch.relu(x.double() @ fc1.double().T + bias.double()) @ fc2.double()
    idle = (logits <= 0).all(dim=0)
    w2, b2 = fc1.clone(), bias.clone()
    fc1[idle], bias[idle], fc2[idle] = NAN, NAN, NAN
    idx = torch.empty(F, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    mask = torch.empty(F, dtype=torch.bool, device=device)
    ops.predict_select(x, w2, b2, 0.0, None, idx, count, mask)
    h = ops.gather_up_proj(x, fc1, bias, idx, count, relu=True)
    y = ops.gather_down_proj(h, fc2, idx, count, skip_zeros=True).sum(0)
    torch.testing.assert_close(y.double(), dense, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_counts(device):
    """The launches are captured with one count and position and replayed with others."""
    torch.manual_seed(0)
    up = make_up(1, 64, 200, 200, 1, True, True, torch.float16, device)
    down = make_down(1, 64, 200, 200, 1, False, torch.float16, device)
    qkv = make_qkv(2, 64, 6, 64, 6, torch.float16, device)
    attention = make_attention(2, 6, 600, 500, 64, 6, torch.float16, device, holes=0.0)
    up["count"] = down["count"] = count = scalar(50, device)
    qkv["count"] = attention["count"] = heads = scalar(2, device)
    attention["position"] = position = scalar(400, device)

    def step():
        return (
            TRITON.gather_up_proj(**up),
            TRITON.gather_down_proj(**down),
            TRITON.decode_attention(**attention),
            TRITON.gather_qkv(**qkv),
        )

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for kept, kept_heads, t in ((50, 2, 400), (200, 6, 450), (0, 0, 3), (7, 1, 499)):
        count.fill_(kept)
        heads.fill_(kept_heads)
        position.fill_(t)
        graph.replay()
        eager = step()
        assert torch.equal(captured[0][:, :kept], eager[0][:, :kept])
        assert torch.equal(captured[1], eager[1])
        assert torch.equal(captured[2][:, :kept_heads], eager[2][:, :kept_heads])
        assert torch.equal(captured[3][:, :kept_heads], eager[3][:, :kept_heads])


@pytest.mark.gpu
@pytest.mark.parametrize("D, N", [(2048, 8192), (7168, 28672)])
def test_rows_loaded_beside_the_norm(D, N, device):
    """The norm lets the projection in; it must still see this norm's x, and no other."""
    torch.manual_seed(0)
    half = {"device": device, "dtype": torch.float16}
    w, parts = torch.randn(N, D, **half) / D**0.5, torch.randn(50, 4, 1, D, device=device)
    norm = Norm(torch.randn(D, **half), torch.randn(D, **half), 1e-5)
    idx, count = torch.randperm(N, device=device).int(), scalar(N // 6, device)

    def results(beside: bool) -> list[torch.Tensor]:
        hidden, out = torch.zeros(1, D, **half), []
        for y in parts:
            x = TRITON.add_norm(y, None, hidden, norm, lets_in=beside)
            out.append(TRITON.gather_up_proj(x, w, None, idx, count, relu=True, ahead=beside)[:, : N // 6])
        return out

    expected = results(False)
    results(True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(True)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))
