import pytest
import torch
import torch.nn.functional as F
from training import tiny_model

from dejavu_ds.collect import Collector
from dejavu_ds.criteria import CRITERIA, gram_matrices, head_scores, largest, log_sizes


def test_contribution_is_the_norm_after_out_proj():
    generator = torch.Generator().manual_seed(0)
    outputs, weight = torch.randn(7, 3, 4, generator=generator), torch.randn(10, 12, generator=generator)
    scores = head_scores("contribution", outputs, gram=gram_matrices(weight, 4))
    for head in range(3):
        added = outputs[:, head].double() @ weight[:, 4 * head : 4 * head + 4].double().T
        torch.testing.assert_close(scores[:, head].double(), added.norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_norm_and_largest():
    outputs = torch.tensor([[[3.0, 4.0], [1.0, 0.0], [0.0, 6.0]]])
    scores = head_scores("norm", outputs)
    assert scores.tolist() == [[5.0, 1.0, 6.0]]
    assert largest(scores, 2).tolist() == [[True, False, True]]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_log_sizes(criterion):
    generator = torch.Generator().manual_seed(0)
    scores, residual = (torch.rand(5, 3, generator=generator) for _ in range(2))
    residual = residual[:, 0] + 1
    sizes = log_sizes(criterion, scores, residual)
    for token in range(5):
        whole = residual[token].sqrt() if criterion == "contribution" else scores[token].sum()
        torch.testing.assert_close(sizes[token].exp(), (scores[token] / whole) ** 2)
    # What a window's last token has for plainact.
    assert (log_sizes("plainact", torch.zeros(1, 3), residual[:1]) == -torch.inf).all()


@pytest.mark.parametrize("gradients", [("heads",), ("mlp",), ("heads", "mlp")])
def test_sensitivity_against_finite_differences(gradients):
    """|value * d loss / d value|, with the derivative from the loss itself in fp64."""
    model = tiny_model().double()
    windows = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(3))
    records = Collector(model, 24, gradients).collect(windows)
    layer, row, position, step = 1, 1, 5, 1e-5
    parts = model.model.decoder.layers[layer]
    wanted = {"heads": (parts.self_attn.out_proj, 4), "mlp": (parts.fc2, 1)}

    def loss_with(module, column: int, change: float) -> tuple[float, float]:
        seen = {}

        def hook(_, inputs):
            x = inputs[0].clone()
            view = x.view(2, 12, -1)
            seen["value"] = view[row, position, column].item()
            view[row, position, column] += change
            return (x,)

        handle = module.register_forward_pre_hook(hook)
        with torch.no_grad():
            logits = model(windows).logits[:, :-1]
        handle.remove()
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").item(), seen["value"]

    for unit in ("heads", "mlp"):
        recorded = getattr(records[layer], "head_sensitivity" if unit == "heads" else "mlp_sensitivity")
        if unit not in gradients:
            assert recorded is None
            continue
        module, group = wanted[unit]
        recorded = recorded.view(2, 12, -1)[row, position]
        chosen = recorded.argmax().item()
        expected = 0.0
        for column in range(chosen * group, (chosen + 1) * group):
            above, value = loss_with(module, column, step)
            below, _ = loss_with(module, column, -step)
            expected += abs(value * (above - below) / (2 * step))
        assert recorded[chosen].item() == pytest.approx(expected, rel=1e-2)  # neurons are kept in bf16


def test_recording_gradients_leaves_no_gradients_and_the_same_records():
    model = tiny_model()
    windows = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(3))
    plain = Collector(model, 24).collect(windows)
    recorded = Collector(model, 24, ("heads", "mlp")).collect(windows)
    assert all(p.grad is None for p in model.parameters())
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(a.activation, b.activation)
        assert not b.activation.requires_grad and not b.head_sensitivity.requires_grad
        # The last token of a window predicts nothing.
        assert (b.head_sensitivity.view(2, 12, -1)[:, -1] == 0).all()
        assert (b.head_sensitivity.view(2, 12, -1)[:, :-1] > 0).all()
