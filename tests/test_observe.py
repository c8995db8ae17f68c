"""Observations against their definitions on Hugging Face's activations."""

import pytest
import torch
from models import tiny_opt
from test_baselines import H, hooked, run, scores, tokens, top
from test_lookahead import random_predictors

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.baselines import use_selection
from dejavu_ds.observe import IDLE_HEAD, observe
from dejavu_ds.taps import tap_of

LAYERS = 3


@pytest.fixture
def seen(device):
    """Inputs of fc2 and out_proj, of the norms, and the hidden states, [2, 16, ...], of Hugging Face's model."""
    model, inputs, taps = tiny_opt().to(device), {}, {}
    hooked(model, lambda l, unit, x: inputs.__setitem__((l, unit), x))
    for l, layer in enumerate(model.model.decoder.layers):
        for point, norm in (("attention", layer.self_attn_layer_norm), ("mlp", layer.final_layer_norm)):
            norm.register_forward_hook(
                lambda m, args, out, key=(l, point): taps.__setitem__(
                    key, (args[0].view(2, 16, -1), out.view(2, 16, -1))
                )
            )
    last = model.model.decoder.final_layer_norm
    last.register_forward_hook(lambda m, args, out: taps.__setitem__("end", args[0].view(2, 16, -1)))
    run(model, tokens(2, 16, device))
    return model.model.decoder.layers, inputs, taps


def test_idle_units_and_the_stream(seen, device):
    layers, inputs, taps = seen
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    got = observe(engine, tokens(2, 16, device), [0.5] * LAYERS, batch_sizes=(1, 16))
    assert got.tokens == 32 and got.neuron_recall == got.head_recall == [None] * LAYERS
    streams = [taps[l, "attention"][0] for l in range(LAYERS)] + [taps["end"]]
    for l, layer in enumerate(layers):
        added = scores(layer, "heads", inputs[l, "heads"], "contribution")
        idle = (added < IDLE_HEAD * added.mean(-1, keepdim=True)).double().mean().item()
        assert got.idle_heads[l] == pytest.approx(idle)
        active = inputs[l, "mlp"] > 0
        assert got.idle_neurons[l] == pytest.approx(1 - active.double().mean().item())
        assert got.active_union[1][l] == pytest.approx(active.double().mean().item())
        assert got.active_union[16][l] == pytest.approx(active.any(1).double().mean().item())
        assert got.kept_union[1][l] == 1.0
        cosine = torch.cosine_similarity(streams[l], streams[l + 1], dim=-1).mean().item()
        assert got.cosine[l] == pytest.approx(cosine, abs=1e-5)
        middle = taps[l, "mlp"][0]
        for unit, x, after in (("attention", streams[l], middle), ("mlp", middle, streams[l + 1])):
            assert got.norms[unit]["x"][l] == pytest.approx(x.norm(dim=-1).mean().item(), rel=1e-4)
            assert got.norms[unit]["f"][l] == pytest.approx((after - x).norm(dim=-1).mean().item(), rel=1e-4)


def test_what_predictors_find(seen, device):
    layers, inputs, taps = seen
    predictors = random_predictors(tiny_opt(), "half", dense_first_layer=True)
    engine = dejavu_ds.init_inference(tiny_opt(), predictors=predictors, dtype=torch.float32)
    got = observe(engine, tokens(2, 16, device), [0.67] * LAYERS, batch_sizes=(16,))
    assert got.neuron_recall[0] is None and got.head_recall[0] is None
    for l in (1, 2):
        kept = {}
        for unit in ("mlp", "heads"):
            predictor, tap = predictors.of(unit)[l].to(device), tap_of(unit, l, "half")
            kept[unit] = predictor.logits(taps[tap.layer, tap.point][1]) > predictor.threshold(0.5)
        active = inputs[l, "mlp"] > 0
        assert got.neuron_recall[l] == pytest.approx((active & kept["mlp"]).sum().item() / active.sum().item())
        assert got.kept_union[16][l] == pytest.approx(kept["mlp"].any(1).double().mean().item())
        needed = top(scores(layers[l], "heads", inputs[l, "heads"], "contribution"), 2)
        assert got.head_recall[l] == pytest.approx((needed & kept["heads"]).sum().item() / needed.sum().item())


def test_what_cannot_be_observed(device):
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    with pytest.raises(ValueError, match="batch of 32 tokens needs windows of as many, got 16"):
        observe(engine, tokens(2, 16, device), [0.5] * LAYERS)
    use_selection(engine, "oracle", SparsityConfig(head_density=1 / H))
    with pytest.raises(ValueError, match="attach predictors or nothing"):
        observe(engine, tokens(1, 16, device), [0.5] * LAYERS, batch_sizes=(1,))
