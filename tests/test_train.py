import re

import pytest
import torch
from training import QUICK, WordTokenizer, tensors_of, tiny_model, token_rows

import dejavu_ds
from dejavu_ds import SparsityConfig, train
from dejavu_ds.calibrate import CURVE_DENSITIES, UnitData, calibrate_quantiles, measure_curve
from dejavu_ds.collect import Collector, tap_input
from dejavu_ds.predictor import Predictor, PredictorSet
from dejavu_ds.taps import UNITS, tap_of
from dejavu_ds.train import TrainConfig, train_predictors
from dejavu_ds.unit_trainer import UnitTrainer


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def documents():
    return token_rows()


@pytest.fixture(scope="module")
def trained(model, documents):
    return train_predictors(model, WordTokenizer(), documents, TrainConfig(**QUICK, head_label_density=0.25), "rows")


@pytest.fixture(scope="module")
def fresh_records(model):
    """A pass over tokens that training did not see."""
    return Collector(model, 1024).collect(torch.randint(3, 60, (32, 32), generator=torch.Generator().manual_seed(9)))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("layer", [1, 2])
def test_recall_is_far_above_chance(trained, fresh_records, unit, layer):
    predictor, record = trained.of(unit)[layer], fresh_records[layer]
    if unit == "mlp":
        active = record.activation > 0
    else:
        norms = record.head_outputs.float().view(-1, 8, 4).norm(dim=-1)
        active = norms >= norms.topk(2, dim=-1).values[:, -1:]
    kept = predictor.logits(tap_input(fresh_records, tap_of(unit, layer, "half")).float()) > predictor.threshold(0.25)
    recall = ((kept & active).sum() / active.sum()).item()
    assert kept.float().mean().item() == pytest.approx(0.25, abs=0.05)
    assert recall > 2 * 0.25


def test_set_is_complete(trained, model, tmp_path):
    assert trained.lookahead == "half" and trained.num_layers == 3
    assert trained.mlp[0] is None and trained.heads[0] is None  # first_layer_density 1.0: dense
    assert [p.rank for p in trained.mlp[1:]] == [16, 16] and [p.rank for p in trained.heads[1:]] == [8, 8]
    assert trained.metadata["config"]["seed"] == 0 and trained.metadata["tokens"]["data"] == "rows"
    trained.save_pretrained(tmp_path)
    loaded = PredictorSet.from_pretrained(tmp_path)
    assert loaded.budgets == trained.budgets and loaded.metadata == trained.metadata
    assert not any(p.requires_grad for p in trained.mlp[1].parameters())


def test_same_seed_same_bits(model, documents, trained):
    again = train_predictors(model, WordTokenizer(), documents, TrainConfig(**QUICK, head_label_density=0.25), "rows")
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(trained), tensors_of(again), strict=True))
    assert again.budgets == trained.budgets
    config = TrainConfig(**QUICK, head_label_density=0.25, seed=1)
    other = train_predictors(model, WordTokenizer(), documents, config)
    assert not torch.equal(other.mlp[1].w1, trained.mlp[1].w1)


def test_validation_documents_are_never_trained_on(model, documents, monkeypatch):
    rounds = []
    collect = Collector.collect

    def recording(self, windows):
        rounds.append(windows)
        return collect(self, windows)

    monkeypatch.setattr(Collector, "collect", recording)
    monkeypatch.setattr(train, "_CALIBRATION_TOKENS", 1)
    marked = [re.sub(r"\b59\b", "58", text) for text in documents[:45]]
    marked += [" ".join(["59"] * 80)] * 5
    train_predictors(model, WordTokenizer(), marked, TrainConfig(**QUICK, validation_share=0.1))
    # Before the first pass, after each of the four, and at the end.
    validation = [windows for windows in rounds if (windows == 59).any()]
    assert len(validation) == 6
    assert all(((windows == 59) | (windows == 2)).all() for windows in validation)
    # 45 documents of 81 tokens in windows of 32, four times.
    assert sum(windows.numel() for windows in rounds if not (windows == 59).any()) == 4 * (45 * 81 // 32 * 32)
    assert max(windows.numel() for windows in rounds) <= QUICK["buffer_tokens"]


def test_model_is_left_as_it_was(model, documents):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    try:
        train_predictors(model, WordTokenizer(), documents[:8], TrainConfig(**QUICK))
        assert model.training
    finally:
        model.eval()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("lookahead", ["full", "none"])
def test_first_layer_and_lookahead(model, documents, lookahead):
    config = TrainConfig(**QUICK, lookahead=lookahead, first_layer_density=0.5)
    predictors = train_predictors(model, WordTokenizer(), documents[:8], config)
    assert predictors.lookahead == lookahead
    for unit in UNITS:
        assert predictors.of(unit)[0] is not None
        assert predictors.densities(unit, 0.2)[0] == 0.5
        assert predictors.densities(unit, 1.0) == [1.0] * 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lookahead": "back"}, ValueError, "back"),
        ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ({"epochs": 1.5}, TypeError, "epochs"),
        ({"rank": 4, "head_rank": -3}, ValueError, "head_rank"),
        ({"buffer_tokens": 100, "context": 256}, ValueError, "100 must hold one window, context is 256"),
        ({"head_label_density": 1.0}, ValueError, r"head_label_density must lie in \(0, 1\)"),
        ({"first_layer_density": 1.2}, ValueError, r"first_layer_density must lie in \(0, 1\]"),
        ({"validation_share": 0.0}, ValueError, "validation_share"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate"),
        ({"criterion": "size"}, ValueError, "criterion must be one of .* got 'size'"),
        ({"units": "neurons"}, ValueError, "units must be one of .* got 'neurons'"),
        ({"head_loss": "big"}, ValueError, "head_loss must be one of .* got 'big'"),
        ({"mlp_weight": "norm"}, ValueError, "mlp_weight must be one of .* got 'norm'"),
        ({"mlp_threshold": -0.1}, ValueError, "mlp_threshold must be 0 or more"),
        ({"max_parameters": 0}, ValueError, "max_parameters must be above 0, got 0"),
        ({"head_rank": 3}, ValueError, "head_rank 3 without rank"),
        ({"first_layer_density": "some"}, ValueError, "first_layer_density must lie in"),
    ],
)
def test_config_rejects(change, error, message):
    with pytest.raises(error, match=message):
        TrainConfig(**change)


def test_training_rejects(model, documents):
    with pytest.raises(ValueError, match="context 65 is more than the 64 positions"):
        train_predictors(model, WordTokenizer(), documents, TrainConfig(context=65))
    with pytest.raises(ValueError, match="at least 2 documents"):
        train_predictors(model, WordTokenizer(), documents[:1], TrainConfig(**QUICK))
    with pytest.raises(ValueError, match="4 tokens do not fill one window of 32"):
        train_predictors(model, WordTokenizer(), ["3 4 5", "6"], TrainConfig(**QUICK))


@pytest.mark.parametrize(
    "change",
    [
        {"criterion": "norm"},
        {"criterion": "contribution", "head_loss": "label"},
        {"criterion": "plainact", "mlp_weight": "plainact"},
        {"criterion": "plainact", "head_loss": "size"},
    ],
)
def test_every_criterion_trains(model, documents, change):
    predictors = train_predictors(model, WordTokenizer(), documents[:8], TrainConfig(**QUICK, **change))
    assert predictors.metadata["criterion"] == change["criterion"]
    curve = predictors.metadata["layers"]["heads"][1]
    assert curve["active"] == 0.5 and curve["recall"][-1] == 1


def test_loss_of_sizes_against_the_formula(model, fresh_records):
    record, config = fresh_records[1], TrainConfig(**QUICK)
    weight = model.model.decoder.layers[1].self_attn.out_proj.weight.detach()
    trainer = UnitTrainer("heads", 1, weight, 4, config, rank=8, target=0.75, steps=8)
    added = torch.einsum("thi,dhi->thd", record.head_outputs.double().view(-1, 8, 4), weight.double().view(32, 8, 4))
    sizes = (added.square().sum(-1) / record.residual.double()[:, None]).log()
    wanted = (sizes - sizes.mean()).clamp(min=-9)
    logits = trainer.predictor.logits(fresh_records[0].mlp.float()).double()
    data = trainer.data(fresh_records)
    trainer._scale = trainer._mean_log_size(data)
    loss = trainer._loss(data, torch.arange(len(sizes))).item()
    assert loss == pytest.approx((logits - wanted).square().mean().item(), rel=1e-4)


def test_sizes_are_learnt(model, documents, fresh_records):
    predictors = train_predictors(model, WordTokenizer(), documents, TrainConfig(**QUICK))
    for layer in (1, 2):
        outputs = fresh_records[layer].head_outputs.float().view(-1, 8, 4)
        out = model.model.decoder.layers[layer].self_attn.out_proj.weight.detach().view(32, 8, 4)
        sizes = (torch.einsum("thi,dhi->thd", outputs, out).square().sum(-1)).log()
        sizes -= fresh_records[layer].residual.log()[:, None]
        logits = predictors.heads[layer].logits(fresh_records[layer - 1].mlp.float())
        assert torch.corrcoef(torch.stack([sizes.flatten(), logits.flatten()]))[0, 1] > 0.5


def test_best_state_is_kept_and_training_stops(model, documents):
    config = TrainConfig(**{**QUICK, "epochs": 40, "patience": 1, "learning_rate": 0.3})
    checks: dict = {}
    check = UnitTrainer.check

    def recording(self, *arguments):
        stopped = self.stopped
        value = check(self, *arguments)
        if not stopped:
            checks.setdefault(self, []).append((value, [p.detach().clone() for p in self.predictor.parameters()]))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitTrainer, "check", recording)
        predictors = train_predictors(model, WordTokenizer(), documents[:8], config)
    assert len(checks) == 4
    for trainer, values in checks.items():
        assert len(values) < 40  # at such a learning rate none gets better for long
        best = max(values, key=lambda pair: pair[0])
        assert values.index(best) == len(values) - 2  # patience 1
        final = predictors.of(trainer.unit)[trainer.layer].parameters()
        assert all(torch.equal(a, b) for a, b in zip(best[1], final, strict=True))


def test_first_layer_auto(model, documents):
    config = TrainConfig(**{**QUICK, "rank": 1, "first_layer_density": "auto", "max_error": 0.05})
    predictors = train_predictors(model, WordTokenizer(), documents[:8], config)
    for unit in UNITS:
        curve, density = predictors.metadata["layers"][unit][0], predictors.densities(unit, 0.2)[0]
        least = next(d for d, error in zip(curve["density"], curve["error"], strict=True) if error <= 0.05)
        cost = 32 + 1 + 2 * (64 if unit == "mlp" else 8)
        worth = (1 - least) * (2 * 32 * 64 if unit == "mlp" else 4 * 32 * 32) > cost
        assert density == (least if worth else 1.0)
        assert (predictors.of(unit)[0] is None) == (density == 1.0)


def test_parameters_stay_within_the_budget(model, documents):
    settings = {**QUICK, "rank": None, "max_parameters": 0.25, "epochs": 1}
    predictors = train_predictors(model, WordTokenizer(), documents[:8], TrainConfig(**settings))
    blocks = sum(p.numel() for p in model.model.decoder.layers.parameters())
    # Not one more rank of a head predictor, the smallest step, would fit.
    assert 0.25 * blocks - (32 + 64 + 1) - (32 + 8 + 1) < predictors.num_parameters() <= 0.25 * blocks


@pytest.mark.parametrize("unit", UNITS)
def test_one_unit_alone(model, documents, unit, tmp_path):
    settings = {**QUICK, "rank": None, "max_parameters": 0.25, "epochs": 1, "first_layer_density": 0.5}
    both = train_predictors(model, WordTokenizer(), documents[:8], TrainConfig(**settings))
    alone = train_predictors(model, WordTokenizer(), documents[:8], TrainConfig(**settings, units=unit))
    alone.save_pretrained(tmp_path)
    alone, other = PredictorSet.from_pretrained(tmp_path), "mlp" if unit == "heads" else "heads"
    for a, b in zip(both.of(unit), alone.of(unit), strict=True):
        assert all(torch.equal(p.half(), q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert alone.budgets[unit] == both.budgets[unit]
    assert alone.of(other) == [None] * 3 and alone.densities(other, 0.2) == [1.0] * 3
    assert alone.default_density(other) == 1.0
    engine = dejavu_ds.init_inference(tiny_model(), predictors=alone, sparsity=SparsityConfig(0.5, 0.5))
    engine.generate(torch.tensor([[2, 5, 7]]), max_new_tokens=6)
    realised = dict(zip(UNITS, (engine.stats.report().mlp_density, engine.stats.report().head_density), strict=True))
    assert realised[other] == 1.0 and realised[unit] < 1.0


def test_curve_against_the_formula():
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, heads, group = 1500, 6, 5, 4
    x, outputs = (torch.randn(tokens, n, generator=generator) for n in (hidden, heads * group))
    weight, residual = torch.randn(hidden, heads * group, generator=generator), torch.rand(tokens) + 1
    predictor = Predictor.random(hidden, 7, heads, generator)
    calibrate_quantiles(predictor, x, generator)

    def label(rows, _):
        return rows.view(-1, heads, group).norm(dim=-1) > 2

    curve = measure_curve(predictor, UnitData(x, outputs, weight, residual, group, label))
    kept = predictor.logits(x) > predictor.threshold(0.3)
    dropped = (outputs.view(-1, heads, group) * ~kept[..., None]).reshape(tokens, -1).double() @ weight.double().T
    at, active = CURVE_DENSITIES.index(0.3), label(outputs, None)
    assert curve["error"][at] == pytest.approx((dropped.square().sum(-1) / residual).mean().item(), rel=1e-5)
    assert curve["recall"][at] == pytest.approx(((kept & active).sum() / active.sum()).item())
    assert curve["precision"][at] == pytest.approx(((kept & active).sum() / kept.sum()).item())
    everything = outputs.double() @ weight.double().T
    share = dropped.square().sum(-1) / residual, everything.square().sum(-1) / residual
    assert curve["kept"][at] == pytest.approx(1 - (share[0].mean() / share[1].mean()).item(), rel=1e-5)
    assert curve["realised"][at] == pytest.approx(0.3, abs=0.003)
    assert curve["active"] == pytest.approx(active.float().mean().item())
    assert curve["error"][-1] == 0 and curve["recall"][-1] == 1 and curve["density"][-1] == 1
