"""Masking a plain model, and densities found with it."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from training import QUICK, WordTokenizer, tiny_model, token_rows

from dejavu_ds.budget import MEAN_DENSITIES
from dejavu_ds.masked import masking, text_perplexity
from dejavu_ds.promise import bytes_model, cheapest, keep_promise
from dejavu_ds.train import TrainConfig, split_windows, train_predictors


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def config():
    return TrainConfig(**QUICK, first_layer_density=0.5)


@pytest.fixture(scope="module")
def windows(config):
    return split_windows(token_rows(), WordTokenizer(), config)


@pytest.fixture
def predictors(model, config):
    return train_predictors(model, WordTokenizer(), token_rows()[:12], config)


@torch.no_grad()
def masked_by_hand(model, predictors, densities, ids):
    """The model's blocks written out, half lookahead, every head's output and activation times its mask."""
    decoder = model.model.decoder
    hidden = decoder.embed_tokens(ids) + decoder.embed_positions(torch.ones_like(ids))
    causal = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)
    thresholds = {u: predictors.densities(u, densities[u]) for u in densities}
    mlp_input = None
    for i, layer in enumerate(decoder.layers):
        x = layer.self_attn_layer_norm(hidden)
        attention = layer.self_attn
        q, k, v = (
            p(x).unflatten(-1, (8, 4)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        out = ((q @ k.transpose(-1, -2) / 2 + causal).softmax(-1) @ v).transpose(1, 2)
        net = predictors.heads[i]
        out = out * (net.logits(x if i == 0 else mlp_input) > net.threshold(thresholds["heads"][i]))[..., None]
        hidden = hidden + attention.out_proj(out.flatten(2))
        mlp_input = layer.final_layer_norm(hidden)
        net = predictors.mlp[i]
        keep = net.logits(x) > net.threshold(thresholds["mlp"][i])
        hidden = hidden + layer.fc2(torch.relu(layer.fc1(mlp_input)) * keep)
    return model.lm_head(decoder.final_layer_norm(hidden))


def test_masking_against_the_blocks_written_out(model, predictors, windows):
    densities, ids = {"mlp": 0.3, "heads": 0.5}, windows[1][:3]
    with masking(model, predictors, densities), torch.no_grad():
        logits = model(ids).logits
    torch.testing.assert_close(logits, masked_by_hand(model, predictors, densities, ids), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        dense = model(ids).logits
        assert not torch.allclose(dense, logits, atol=1e-2)
        with masking(model, predictors, {"mlp": 1.0, "heads": 1.0}):
            assert torch.equal(model(ids).logits, dense)
        assert torch.equal(model(ids).logits, dense)  # and no hook is left


def test_perplexity_is_that_of_hugging_face(model, windows):
    losses = [model(row[None], labels=row[None]).loss.item() for row in windows[1]]
    assert text_perplexity(model, windows[1]) == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


@pytest.mark.parametrize(
    "needed", [{"mlp": 0.3, "heads": 0.75}, {"mlp": 0.05, "heads": 1.0}, {"mlp": 1.0, "heads": 1.0}]
)
def test_cheapest_against_trying_all(needed):
    def keeps(densities):
        return all(densities[unit] >= needed[unit] for unit in needed)

    def read(densities):
        return 2 * densities["mlp"] + densities["heads"]

    everything = [{"mlp": m, "heads": h} for m in MEAN_DENSITIES for h in (1.0, 0.9, 0.75, 0.6, 0.5)]
    assert cheapest(keeps, read) == min(filter(keeps, everything), key=read)


def test_bytes_are_of_the_units_kept_and_the_predictors(model, predictors):
    read = bytes_model(model, predictors)
    assert read({"mlp": 1.0, "heads": 1.0}) == 3 * (2 * 32 * 64 + 4 * 32 * 32)
    mlp = sum(predictors.densities("mlp", 0.2)) * 2 * 32 * 64 + predictors.num_parameters("mlp")
    assert read({"mlp": 0.2, "heads": 1.0}) == pytest.approx(mlp + 3 * 4 * 32 * 32)


def perplexity_by_hand(model, windows) -> float:
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    return math.exp(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item())


@pytest.mark.parametrize("increase", [0.001, 0.02])
def test_promise_is_kept_on_text_not_trained_on(model, predictors, windows, increase):
    promise = keep_promise(model, predictors, windows[0][:32], windows[1], increase)
    dense = perplexity_by_hand(model, windows[1])
    with masking(model, predictors, promise["densities"]):
        rise = perplexity_by_hand(model, windows[1]) / dense - 1
    assert rise <= increase and promise["confirmed"] == pytest.approx(rise, abs=2e-5)
    assert {unit: predictors.default_density(unit) for unit in ("mlp", "heads")} == promise["densities"]
    assert predictors.metadata["promise"] == promise
    if increase == 0.02:
        assert promise["densities"]["mlp"] < 1


@pytest.mark.parametrize("dense", ["mlp", "heads"])
def test_promise_of_one_unit(model, config, windows, dense):
    unit = "heads" if dense == "mlp" else "mlp"
    config = dataclasses.replace(config, units=unit)
    predictors = train_predictors(model, WordTokenizer(), token_rows()[:12], config)
    promise = keep_promise(model, predictors, windows[0][:32], windows[1], 0.05)
    assert promise["densities"][dense] == 1.0 == predictors.default_density(dense)
    assert promise["confirmed"] <= 0.05


def test_an_impossible_promise_is_refused(model, predictors, windows):
    with pytest.raises(ValueError, match="above 0, got 0"):
        keep_promise(model, predictors, windows[0], windows[1], 0.0)
    # Less than rounding: nothing but dense keeps it.
    assert keep_promise(model, predictors, windows[0][:8], windows[1], 1e-12)["densities"] == {"mlp": 1.0, "heads": 1.0}
