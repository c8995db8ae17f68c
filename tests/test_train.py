import re
from types import SimpleNamespace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from dejavu_ds import train
from dejavu_ds.calibrate import CURVE_DENSITIES, UnitData, calibrate_quantiles, measure_curve
from dejavu_ds.collect import Collector, tap_input
from dejavu_ds.predictor import Predictor, PredictorSet
from dejavu_ds.taps import tap_of
from dejavu_ds.train import TrainConfig, train_predictors

UNITS = ("mlp", "heads")
QUICK = {"rank": 16, "epochs": 4, "context": 32, "buffer_tokens": 1024, "batch_tokens": 128, "learning_rate": 1e-2}


class WordTokenizer:
    """A document is a row of token ids."""

    bos_token_id = 2

    def __call__(self, documents, **_):
        return SimpleNamespace(input_ids=[[int(word) for word in text.split()] for text in documents])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 8}
    config = OPTConfig(**sizes, num_hidden_layers=3, vocab_size=60, max_position_embeddings=64, init_std=0.15)
    model = OPTForCausalLM(config).eval()
    for layer in model.model.decoder.layers:
        layer.fc1.bias.data.fill_(-0.8)  # makes the ReLU sparse
    return model


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 60, (60, 80), generator=generator).tolist()
    return [" ".join(map(str, row)) for row in rows]


@pytest.fixture(scope="module")
def trained(model, documents):
    return train_predictors(model, WordTokenizer(), documents, TrainConfig(**QUICK, head_label_density=0.25), "rows")


@pytest.fixture(scope="module")
def fresh_records(model):
    """A pass over tokens that training did not see."""
    return Collector(model, 1024).collect(torch.randint(3, 60, (32, 32), generator=torch.Generator().manual_seed(9)))


def tensors_of(predictors: PredictorSet) -> list[torch.Tensor]:
    kept = [p for unit in UNITS for p in predictors.of(unit) if p is not None]
    return [t for p in kept for t in (*p.parameters(), p.quantiles)]


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
    assert not any((windows == 59).any() for windows in rounds[:-1])
    assert ((rounds[-1] == 59) | (rounds[-1] == 2)).all()
    # 45 documents of 81 tokens in windows of 32, four times.
    assert sum(windows.numel() for windows in rounds[:-1]) == 4 * (45 * 81 // 32 * 32)
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
        ({"head_rank": -3}, ValueError, "head_rank"),
        ({"buffer_tokens": 100, "context": 256}, ValueError, "100 must hold one window, context is 256"),
        ({"head_label_density": 1.0}, ValueError, r"head_label_density must lie in \(0, 1\)"),
        ({"first_layer_density": 1.2}, ValueError, r"first_layer_density must lie in \(0, 1\]"),
        ({"validation_share": 0.0}, ValueError, "validation_share"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate"),
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


def test_curve_against_the_formula():
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, heads, group = 1500, 6, 5, 4
    x, outputs = (torch.randn(tokens, n, generator=generator) for n in (hidden, heads * group))
    weight, residual = torch.randn(hidden, heads * group, generator=generator), torch.rand(tokens) + 1
    predictor = Predictor.random(hidden, 7, heads, generator)
    calibrate_quantiles(predictor, x, generator)

    def label(rows):
        return rows.view(-1, heads, group).norm(dim=-1) > 2

    curve = measure_curve(predictor, UnitData(x, outputs, weight, residual, group, label))
    kept = predictor.logits(x) > predictor.threshold(0.3)
    dropped = (outputs.view(-1, heads, group) * ~kept[..., None]).reshape(tokens, -1).double() @ weight.double().T
    at, active = CURVE_DENSITIES.index(0.3), label(outputs)
    assert curve["error"][at] == pytest.approx((dropped.square().sum(-1) / residual).mean().item(), rel=1e-5)
    assert curve["recall"][at] == pytest.approx(((kept & active).sum() / active.sum()).item())
    assert curve["precision"][at] == pytest.approx(((kept & active).sum() / kept.sum()).item())
    assert curve["realised"][at] == pytest.approx(0.3, abs=0.003)
    assert curve["active"] == pytest.approx(active.float().mean().item())
    assert curve["error"][-1] == 0 and curve["recall"][-1] == 1 and curve["density"][-1] == 1
