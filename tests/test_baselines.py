"""Oracle, static and random selections, masked and through the decode step, against hooks on Hugging Face's model."""

import math

import pytest
import torch
from models import decode_logits, tiny_opt
from test_lookahead import random_predictors

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.baselines import HEAD_CRITERIA, layer_densities, mean_scores, use_selection
from dejavu_ds.evaluate import Scorer

LAYERS, F, H, HEAD_DIM = 3, 77, 3, 20
DENSITIES = {"mlp": [1.0, 0.3, 0.5], "heads": [1.0, 0.34, 0.67]}
KEPT = {"mlp": [F, 23, 38], "heads": [H, 1, 2]}
TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}


def tokens(B, S, device):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(1)).to(device)


def scores(layer, unit, x, criterion="norm"):
    """What each unit adds, from the input of fc2 or out_proj [..., N * group], by the definition and in fp64."""
    x = x.double()
    if unit == "mlp":
        return x * layer.fc2.weight.double().norm(dim=0)
    if criterion == "norm":
        return x.unflatten(-1, (H, HEAD_DIM)).norm(dim=-1)
    w = layer.self_attn.out_proj.weight.double()
    parts = [x[..., h * HEAD_DIM : (h + 1) * HEAD_DIM] @ w[:, h * HEAD_DIM : (h + 1) * HEAD_DIM].T for h in range(H)]
    return torch.stack([part.norm(dim=-1) for part in parts], dim=-1)


def hooked(model, choose):
    """Zero, in Hugging Face's model, the units that `choose(layer, unit, input [B, S, N * group])` drops."""
    for l, layer in enumerate(model.model.decoder.layers):
        for unit, module, group in (("mlp", layer.fc2, 1), ("heads", layer.self_attn.out_proj, HEAD_DIM)):

            def hook(_, args, l=l, unit=unit, group=group):
                # Some versions of transformers flatten the tokens before fc2.
                x = args[0].view(model.batch, -1, args[0].shape[-1])
                keep = choose(l, unit, x)
                return None if keep is None else ((x * keep.repeat_interleave(group, -1)).view(args[0].shape),)

            module.register_forward_pre_hook(hook)
    return model


def top(values, k):
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, values.topk(k).indices, True)


def run(model, ids):
    model.batch = ids.shape[0]
    with torch.no_grad():
        return model(ids).logits


def engine_of(selection, **kwargs):
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    use_selection(engine, selection, SparsityConfig(recovery_window=5), densities=DENSITIES, **kwargs)
    return engine


@pytest.mark.parametrize("criterion", HEAD_CRITERIA)
@pytest.mark.parametrize("mode", ["masked", "decode"])
def test_the_oracle_keeps_what_adds_most(mode, criterion, device):
    ids = tokens(2, 24, device)
    model = tiny_opt().to(device)
    layers = model.model.decoder.layers

    def choose(l, unit, x):
        return top(scores(layers[l], unit, x, criterion), KEPT[unit][l])

    scorer = Scorer(engine_of("oracle", criterion=criterion), mode)
    torch.testing.assert_close(scorer.logits(ids), run(hooked(model, choose), ids), **TOLERANCE)
    mlp, heads = scorer.densities_by_layer()
    assert mlp == pytest.approx([1.0, 23 / F, 38 / F]) and heads == pytest.approx([1.0, 1 / 3, 2 / 3])


def test_a_batch_of_the_oracle_is_the_union(device):
    """And the keys and values that skipped heads missed are made up, though the oracle has looked at them."""
    ids, start = tokens(3, 30, device), 8
    model = tiny_opt().to(device)
    layers = model.model.decoder.layers

    def choose(l, unit, x):
        keep = top(scores(layers[l], unit, x), KEPT[unit][l]).any(0, keepdim=True).expand(3, -1, -1).clone()
        keep[:, :start] = True
        return keep

    engine = engine_of("oracle")
    want = run(hooked(model, choose), ids)[:, start - 1 :]
    torch.testing.assert_close(decode_logits(engine, ids, start), want, **TOLERANCE)
    assert engine.stats.report().head_density < 1


@pytest.mark.parametrize("mode", ["masked", "decode"])
def test_static_is_one_set_by_mean_score(mode, device):
    calibration, ids = tokens(6, 20, device), tokens(2, 24, device)
    model = tiny_opt().to(device)
    layers, totals = model.model.decoder.layers, {}

    def record(l, unit, x):
        totals[l, unit] = scores(layers[l], unit, x).flatten(0, 1).mean(0)

    run(hooked(model, record), calibration)
    kept = {key: top(total, KEPT[key[1]][key[0]]) for key, total in totals.items()}

    def choose(l, unit, x):
        return kept[l, unit].expand(*x.shape[:2], -1)

    want = run(hooked(tiny_opt().to(device), choose), ids)
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    static = mean_scores(engine, calibration, batch_size=4)
    use_selection(engine, "static", densities=DENSITIES, static=static)
    torch.testing.assert_close(Scorer(engine, mode).logits(ids), want, **TOLERANCE)


def test_random_sets_are_fresh_even_and_seeded(device):
    ids = tokens(2, 60, device)
    results = []
    for seed in (3, 3, 4):
        engine = engine_of("random", seed=seed)
        selector = engine.blocks[1].mlp.selector
        results.append((selector.keep(torch.zeros(500, 60, device=device)), Scorer(engine, "masked").logits(ids)))
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], results[2][1])
    keep = results[0][0]
    assert torch.equal(keep, results[1][0]) and bool((keep.sum(-1) == 23).all())
    assert len(keep.unique(dim=0)) == 500
    # Each neuron's count is hypergeometric: mean p, six standard errors either way.
    p = 23 / F
    assert (keep.double().mean(0) - p).abs().max() < 6 * math.sqrt(p * (1 - p) / 500)
    decode = Scorer(engine, "decode")
    decode.logits(ids)
    assert decode.densities_by_layer()[1] == pytest.approx([1.0, 1 / 3, 2 / 3])


def test_switching_between_selections_leaves_nothing_behind(device):
    ids = tokens(1, 20, device)
    predictors = random_predictors(tiny_opt(), "half")
    engine = dejavu_ds.init_inference(tiny_opt(), predictors=predictors, dtype=torch.float32)
    first = Scorer(engine, "decode").logits(ids)
    static = mean_scores(engine, ids)
    torch.testing.assert_close(Scorer(engine, "decode").logits(ids), run(tiny_opt().to(device), ids), **TOLERANCE)
    for name in ("oracle", "static", "random"):
        use_selection(engine, name, static=static)
        scorer = Scorer(engine, "decode")
        assert (scorer.logits(ids) - first).abs().max() > 1e-2
        # The set's budget is .5 everywhere: 38 of 77 neurons and 2 of 3 heads.
        assert scorer.densities() == pytest.approx((38 / F, 2 / 3))
        assert engine.stats.report().weight_bytes_read < engine.stats.report().dense_weight_bytes
    use_selection(engine, "predictor")
    assert torch.equal(Scorer(engine, "decode").logits(ids), first)
    use_selection(engine, "predictor", SparsityConfig(mlp_density=0.2))
    sparser = Scorer(engine, "decode")
    sparser.logits(ids)
    assert sparser.densities()[0] < 0.45


def test_densities_come_from_the_budget():
    engine = dejavu_ds.init_inference(tiny_opt(), predictors=random_predictors(tiny_opt(), "half"), dtype=torch.float32)
    asked = layer_densities(engine, SparsityConfig(mlp_density=0.75))
    assert asked == {"mlp": [0.75] * LAYERS, "heads": [0.5] * LAYERS}
    bare = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    assert layer_densities(bare, SparsityConfig(0.2)) == {"mlp": [1.0, 0.2, 0.2], "heads": [1.0] * LAYERS}


def test_bad_selections_are_refused():
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"selection must be one of predictor.*'topk'"):
        use_selection(engine, "topk")
    with pytest.raises(ValueError, match="needs predictors"):
        use_selection(engine, "predictor")
    with pytest.raises(ValueError, match="mean_scores"):
        use_selection(engine, "static")
    with pytest.raises(ValueError, match=r"criterion.*'plain'"):
        use_selection(engine, "oracle", densities=DENSITIES, criterion="plain")
