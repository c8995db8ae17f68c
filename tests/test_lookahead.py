"""Predicted selections: the sets are those of the predictors on Hugging Face's own activations, at every lookahead."""

import pytest
import torch
from models import decode_logits, tiny_opt

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.block import PerToken
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.predictor import Predictor, PredictorSet
from dejavu_ds.taps import LOOKAHEADS, tap_of

LAYERS, D, F, H, HEAD_DIM = 3, 60, 77, 3, 20


def random_predictors(model, lookahead, seed=0, dense_first_layer=False, rank=9, sizes=(D, F, H)):
    """A calibrated set of random nets; thresholds are quantiles of their logits on random inputs of unit variance."""
    generator = torch.Generator().manual_seed(seed)

    def predictor(units):
        p = Predictor.random(sizes[0], rank, units, generator)
        p.w2.data *= 3
        p.calibrate(p.logits(torch.randn(400, sizes[0], generator=generator)))
        return p

    nets = {}
    for unit, units in (("mlp", sizes[1]), ("heads", sizes[2])):
        nets[unit] = [predictor(units) for _ in range(LAYERS)]
        if dense_first_layer:
            nets[unit][0] = None
    flat = {"default": 0.5, "means": [0.5, 1.0], "rows": [[0.5] * LAYERS, [1.0] * LAYERS]}
    return PredictorSet(
        lookahead=lookahead,
        fingerprint=fingerprint(model),
        **nets,
        budgets={"mlp": flat, "heads": flat},
        metadata={},
    )


class MaskedReference:
    """Hugging Face's model with neurons and heads zeroed by the predictors from its own activations.

    Positions before `start` are dense (prefill); after it, each has the union over the sequences of the batch.
    Attention over all keys and values: those of a head that is left out exist all the same.
    """

    def __init__(self, model, predictors, densities, start):
        self.model, self.start, self.taps = model, start, {}
        for l, layer in enumerate(model.model.decoder.layers):
            for point, reader in (("attention", layer.self_attn.q_proj), ("mlp", layer.fc1)):
                reader.register_forward_pre_hook(lambda m, args, key=(l, point): self.taps.__setitem__(key, args[0]))
            for unit, module, group in (("mlp", layer.fc2, 1), ("heads", layer.self_attn.out_proj, HEAD_DIM)):
                predictor = predictors.of(unit)[l]
                if predictor is None:
                    continue
                threshold = predictor.threshold(densities[unit])
                tap = tap_of(unit, l, predictors.lookahead)
                module.register_forward_pre_hook(self.zero(predictor, threshold, tap, group))

    def zero(self, predictor, threshold, tap, group):
        def hook(module, args):
            x = self.taps[tap.layer, tap.point].view(self.batch, -1, D)
            keep = (predictor.logits(x) > threshold).any(0, keepdim=True).repeat_interleave(group, -1)
            keep = keep.expand(self.batch, -1, -1).clone()
            keep[:, : self.start] = True
            return ((args[0].view(keep.shape) * keep).view(args[0].shape),)

        return hook

    def __call__(self, ids):
        self.batch = ids.shape[0]
        with torch.no_grad():
            return self.model(ids).logits


@pytest.mark.parametrize("mode", ["gather", "masked"])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_decode_uses_the_tap_of_its_lookahead(lookahead, B, mode, device):
    ids = torch.randint(3, 131, (B, 30), generator=torch.Generator().manual_seed(1)).to(device)
    predictors = random_predictors(tiny_opt(), lookahead)
    moved = [p.to(device) for p in (*predictors.mlp, *predictors.heads)]
    assert len(moved) == 2 * LAYERS
    want = MaskedReference(tiny_opt().to(device), predictors, {"mlp": 0.5, "heads": 0.5}, start=8)(ids)[:, 7:]
    engine = dejavu_ds.init_inference(
        tiny_opt(), predictors=predictors, sparsity=SparsityConfig(mode=mode, recovery_window=6), dtype=torch.float32
    )
    torch.testing.assert_close(decode_logits(engine, ids, 8), want, atol=3e-4, rtol=3e-4)
    report = engine.stats.report()
    assert report.steps == 22
    assert 0.2 < report.mlp_density < 0.98 and 0.2 < report.head_density < 0.98


def test_the_lookaheads_differ(device):
    ids = torch.randint(3, 131, (1, 20), generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for lookahead in LOOKAHEADS:
        predictors = random_predictors(tiny_opt(), lookahead)
        engine = dejavu_ds.init_inference(tiny_opt(), predictors=predictors, dtype=torch.float32)
        results.append(decode_logits(engine, ids, 8))
    for i in range(3):
        assert (results[i] - results[i - 1]).abs().max() > 1e-2


def test_masked_at_every_position(device):
    """The evaluation in which each token has its own sets; prefill of one window."""
    ids = torch.randint(3, 131, (1, 20), generator=torch.Generator().manual_seed(1)).to(device)
    predictors = random_predictors(tiny_opt(), "half")
    for p in (*predictors.mlp, *predictors.heads):
        p.to(device)
    want = MaskedReference(tiny_opt().to(device), predictors, {"mlp": 0.5, "heads": 0.5}, start=0)(ids)
    engine = dejavu_ds.init_inference(tiny_opt(), predictors=predictors, dtype=torch.float32)
    got = engine(ids, use_cache=False, per_token=PerToken()).logits
    torch.testing.assert_close(got, want, atol=3e-4, rtol=3e-4)
    assert "past_key_values" not in engine(ids, use_cache=False)


def test_densities_asked_for_change_logits_and_bytes(device):
    ids = torch.randint(3, 131, (1, 20), generator=torch.Generator().manual_seed(1)).to(device)
    results, reports = [], []
    for density in (0.5, 0.75, 1.0):
        engine = dejavu_ds.init_inference(
            tiny_opt(),
            predictors=random_predictors(tiny_opt(), "half"),
            sparsity=SparsityConfig(mlp_density=density, head_density=density),
            dtype=torch.float32,
        )
        results.append(decode_logits(engine, ids, 8))
        reports.append(engine.stats.report())
    with torch.no_grad():
        dense = tiny_opt().to(device)(ids).logits[:, 7:]
    torch.testing.assert_close(results[2], dense, atol=3e-4, rtol=3e-4)
    assert (results[0] - results[1]).abs().max() > 1e-2
    assert reports[0].weight_bytes_read < reports[1].weight_bytes_read
    assert reports[0].mlp_density < reports[1].mlp_density < reports[2].mlp_density == 1.0
    assert reports[2].share_read == 1.0 and reports[2].weight_bytes_read == reports[2].dense_weight_bytes


def test_bytes_read_add_up(device):
    """From the kept counts, by hand: fp32, biases and predictors included."""
    ids = torch.randint(3, 131, (1, 20), generator=torch.Generator().manual_seed(1)).to(device)
    predictors = random_predictors(tiny_opt(), "none", dense_first_layer=True)
    sparsity = SparsityConfig(mlp_density=0.5, head_density=1.0)
    engine = dejavu_ds.init_inference(tiny_opt(), predictors=predictors, sparsity=sparsity, dtype=torch.float32)
    decode_logits(engine, ids, 8)
    report = engine.stats.report()
    attention, norms, fc2_bias = 4 * D * D + 4 * D, 4 * D, D
    neurons = sum(report.mlp_by_layer) * F
    want = LAYERS * (attention + norms + fc2_bias) + neurons * (2 * D + 1)
    rank = 12  # 9, in whole 16 bytes
    want += 2 * (rank * D + rank + rank * F + F) + 131 * D
    assert report.weight_bytes_read == pytest.approx(4 * want, abs=0.5)  # it is a whole number
    assert report.mlp_by_layer[0] == 1.0 and report.heads_by_layer == [1.0] * LAYERS


def test_predictors_of_another_lookahead_are_refused():
    with pytest.raises(ValueError, match=r"half.*full"):
        dejavu_ds.init_inference(
            tiny_opt(), predictors=random_predictors(tiny_opt(), "half"), sparsity=SparsityConfig(lookahead="full")
        )
