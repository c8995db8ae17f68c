"""Mode "auto": the way that was fastest is taken, and it is what it says."""

import logging

import pytest
import torch
from models import tiny_opt
from test_lookahead import random_predictors

import dejavu_ds
from dejavu_ds import SparsityConfig, plan
from dejavu_ds.baselines import use_selection
from dejavu_ds.block import SparseBlock

IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
WAYS = [frozenset(), frozenset({"heads"}), frozenset({"mlp"}), frozenset({"heads", "mlp"})]


def engine_of(mode="auto", lookahead="half", **density):
    model = tiny_opt()
    sparsity = SparsityConfig(**{"mlp_density": 0.3, "head_density": 0.5} | density, mode=mode, recovery_window=5)
    predictors = random_predictors(model, lookahead)
    return dejavu_ds.init_inference(model, predictors=predictors, sparsity=sparsity, dtype=torch.float32)


@pytest.fixture
def fastest(monkeypatch):
    """Let a way be the fastest: a clock by which the other ones take longer."""

    def choose(way):
        asked = []

        def milliseconds(step, device):
            step()
            asked.append(len(asked) // (plan._WARM_UP + plan._REPEATS))
            return 1.0 if WAYS[asked[-1]] == way else 2.0

        monkeypatch.setattr(plan, "_milliseconds", milliseconds)
        return asked

    return choose


def text(engine, device):
    return engine.generate(IDS.to(device), max_new_tokens=20)


@pytest.mark.parametrize("lookahead", ["half", "full", "none"])
def test_the_sparse_way_is_that_of_gather(fastest, lookahead, device):
    asked = fastest(frozenset())
    engine = engine_of(lookahead=lookahead)
    assert torch.equal(text(engine, device), text(engine_of("gather", lookahead), device))
    assert asked[-1] == len(WAYS) - 1  # every way was measured, once
    count = len(asked)
    engine.generate(IDS.to(device), max_new_tokens=3)
    assert len(asked) == count  # a batch of this size is known


@pytest.mark.parametrize("lookahead", ["half", "full", "none"])
def test_the_dense_way_is_hugging_face(fastest, lookahead, device, caplog):
    fastest(WAYS[3])
    engine = engine_of(lookahead=lookahead)
    with caplog.at_level(logging.WARNING, "dejavu_ds"):
        out = text(engine, device)
    assert torch.equal(out, tiny_opt().to(device).generate(IDS.to(device), max_new_tokens=20, do_sample=False))
    assert "batch of 2: heads and MLP run dense: 1.000 ms a step, 2.000 ms sparse" in caplog.text
    report = engine.stats.report()
    assert report.mlp_density == report.head_density == report.share_read == 1.0


@pytest.mark.parametrize(("way", "density"), [(WAYS[1], {"head_density": 1.0}), (WAYS[2], {"mlp_density": 1.0})])
def test_one_unit_dense_is_that_unit_at_density_1(fastest, way, density, device, caplog):
    fastest(way)
    engine, other = engine_of(), engine_of("gather", **density)
    with caplog.at_level(logging.WARNING, "dejavu_ds"):
        assert torch.equal(text(engine, device), text(other, device))
    assert f"batch of 2: {'heads run' if way == WAYS[1] else 'MLP runs'} dense: 1.000 ms a step" in caplog.text
    assert engine.stats.report() == other.stats.report()


def test_measuring_leaves_no_trace(fastest, device):
    fastest(frozenset())
    engine, other = engine_of(), engine_of("gather")
    text(engine, device), text(other, device)
    assert engine.stats.report() == other.stats.report()


def test_nothing_to_choose(monkeypatch, device):
    monkeypatch.setattr(plan, "_milliseconds", lambda *_: pytest.fail("measured"))
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    text(engine, device)


def test_a_step_is_really_timed(device):
    """Without a made-up clock: some way is taken, and the text is that of this way."""
    engine = engine_of()
    out = text(engine, device)
    (way,) = engine.runner._ways.values()
    units = {"mlp": "mlp_density", "heads": "head_density"}
    assert torch.equal(out, text(engine_of("gather", **{units[unit]: 1.0 for unit in way}), device))


@pytest.fixture
def ahead(monkeypatch):
    """Of every block's decode step, whether projections may load rows before the launch that makes their input ends."""
    asked, decode = [], SparseBlock.decode
    monkeypatch.setattr(SparseBlock, "decode", lambda *args: asked.append(args[-1]) or decode(*args))
    return asked


def test_rows_are_loaded_ahead_where_nothing_is_selected(ahead, device):
    text(dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32), device)
    assert ahead and all(ahead)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_loaded_ahead_in_no_step_that_selects(way, fastest, ahead, device):
    """What is being selected must not be read before: also where one unit runs dense beside the other."""
    fastest(way)
    engine = engine_of()
    text(engine, device)  # with the ways that are tried
    ahead.clear()
    engine.runner.release()
    text(engine, device)
    assert ahead and set(ahead) == {way == WAYS[3]}


@pytest.mark.parametrize("density", [{"mlp_density": 0.5}, {"head_density": 0.5}], ids=["mlp", "heads"])
def test_rows_are_loaded_ahead_under_no_oracle(density, ahead, device):
    """An oracle of heads makes its list within the unit, from the unit's true outputs."""
    engine = dejavu_ds.init_inference(tiny_opt(), dtype=torch.float32)
    use_selection(engine, "oracle", SparsityConfig(**{"mlp_density": 1.0, "head_density": 1.0} | density))
    text(engine, device)
    assert ahead and not any(ahead)
