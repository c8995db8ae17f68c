"""Steps of an engine: replayed graphs against eager steps, caches that are used again, choices on the device."""

import pytest
import torch
from models import FixedSelector, decode_logits, fix_selection, tiny_opt
from test_lookahead import random_predictors
from transformers import LogitsProcessorList, TopKLogitsWarper

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.collectives import TensorParallel
from dejavu_ds.runner import release_graphs
from dejavu_ds.token_loop import TokenChooser


def engine_of(lookahead="half", predictors=True, **kwargs):
    model = tiny_opt()
    if predictors:
        kwargs["predictors"] = random_predictors(model, lookahead)
        kwargs.setdefault("sparsity", SparsityConfig(mlp_density=0.3, head_density=0.5, recovery_window=5))
    return dejavu_ds.init_inference(model, **{"dtype": torch.float32} | kwargs)


def prompt(B=2, S=7, device="cpu", seed=3):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("B", [1, 3, 6])
@pytest.mark.parametrize("lookahead", ["half", "full", "none", "dense"])
def test_a_replayed_step_has_the_bits_of_an_eager_one(lookahead, B, dtype, device):
    """Over 40 steps in which heads come and go, so that short and long runs are recovered under replay."""
    ids, results = prompt(B, 48, device), []
    for graph in (True, False):
        sparse = lookahead != "dense"
        engine = engine_of(lookahead, predictors=sparse, dtype=dtype, enable_cuda_graph=graph)
        assert engine.runner.uses_graphs == graph
        results.append((decode_logits(engine, ids, 8), engine.stats.report()))
    (replayed, counted), (eager, expected) = results
    assert torch.equal(replayed, eager)
    assert counted == expected
    if lookahead != "dense":
        assert 0 < counted.mlp_density < 1 and 0 < counted.head_density < 1


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}])
def test_generation_with_and_without_graphs(options, device):
    """The second call runs in the cache, and with the graphs, that the first has left; the third enlarges it."""
    results = []
    for graph in (True, False):
        engine, texts = engine_of(enable_cuda_graph=graph), []
        for new_tokens, seed in ((20, 0), (30, 1), (80, 2)):
            torch.manual_seed(seed)
            texts.append(engine.generate(prompt(3, 9, device, seed), max_new_tokens=new_tokens, **options))
        results.append(texts)
    for with_graph, without in zip(*results, strict=True):
        assert torch.equal(with_graph, without)


@pytest.mark.gpu
def test_a_choice_outlives_the_call_that_made_it(device):
    """A graph knows the addresses of the end-of-sequence and padding tokens, which every call makes anew."""
    engine, reference = engine_of(predictors=False), tiny_opt().to(device)
    ids = prompt(3, 9, device)
    for last in (40, 40, 90, 40):
        options = {"eos_token_id": list(range(3, last)), "pad_token_id": 1, "max_new_tokens": 25}
        assert torch.equal(engine.generate(ids, **options), reference.generate(ids, do_sample=False, **options))
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"do_sample": True}])
def test_auto_with_graphs(options, device):
    """Measured in the first call, known in the second, in which the cache is another."""
    auto = engine_of(sparsity=SparsityConfig(mlp_density=0.3, head_density=0.5, mode="auto"))
    results = []
    for new_tokens in (12, 100):
        torch.manual_seed(new_tokens)
        results.append(auto.generate(prompt(2, 9, device), max_new_tokens=new_tokens, **options))
        auto.runner._spare = None
    (way,) = auto.runner._ways.values()
    densities = (1.0 if "mlp" in way else 0.3, 1.0 if "heads" in way else 0.5)
    fixed = engine_of(sparsity=SparsityConfig(*densities), enable_cuda_graph=False)
    for new_tokens, result in zip((12, 100), results, strict=True):
        torch.manual_seed(new_tokens)
        assert torch.equal(result, fixed.generate(prompt(2, 9, device), max_new_tokens=new_tokens, **options))


@pytest.mark.gpu
def test_released_graphs_are_captured_again(device):
    engine, ids = engine_of(), prompt(device=device)
    first = engine.generate(ids, max_new_tokens=12)
    release_graphs()
    assert torch.equal(engine.generate(ids, max_new_tokens=12), first)


@pytest.mark.gpu
def test_a_selection_that_cannot_be_captured_runs_eagerly(device):
    engine = engine_of(predictors=False)
    assert engine.runner.uses_graphs
    fix_selection(engine, mlp=lambda i: [torch.ones(77, dtype=torch.bool, device=device)])
    assert not engine.runner.uses_graphs
    engine.generate(prompt(device=device), max_new_tokens=4)


@pytest.mark.gpu
def test_other_selections_are_captured_anew(device):
    engine = engine_of()
    ids = prompt(device=device)
    sparse = engine.generate(ids, max_new_tokens=20)
    engine.attach({}, SparsityConfig())
    dense = engine.generate(ids, max_new_tokens=20)
    assert torch.equal(dense, tiny_opt().to(device).generate(ids, max_new_tokens=20, do_sample=False))
    assert not torch.equal(sparse, dense)


def test_a_cache_is_used_again(device):
    engine, ids = engine_of(), prompt(device=device)
    first = engine.generate(ids, max_new_tokens=12)
    spare = engine.runner._spare
    other = engine.generate(prompt(seed=8, device=device), max_new_tokens=30)
    assert engine.runner._spare is spare
    assert torch.equal(engine.generate(ids, max_new_tokens=12), first)
    assert torch.equal(engine.generate(prompt(seed=8, device=device), max_new_tokens=30), other)
    engine.generate(prompt(B=3, device=device), max_new_tokens=4)
    assert engine.runner._spare is not spare


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_both_loops_keep_the_cache(options, device):
    engine = engine_of()
    engine.generate(prompt(device=device), max_new_tokens=4, **options)
    spare = engine.runner._spare
    assert spare is not None
    engine.generate(prompt(device=device), max_new_tokens=4, **options)
    assert engine.runner._spare is spare


def test_a_cache_that_was_handed_out_is_not_used_again(device):
    engine, ids = engine_of(), prompt(device=device)
    out = engine.generate(ids, max_new_tokens=5, return_dict_in_generate=True)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    before = cache.layers[1].k.clone()
    engine.generate(prompt(seed=9, device=device), max_new_tokens=9)
    assert torch.equal(cache.layers[1].k, before)


def test_an_aborted_generation_leaves_nothing_behind(device):
    engine, ids = engine_of(), prompt(device=device)
    want = engine.generate(ids, max_new_tokens=12)

    class Broken:
        def put(self, value):
            raise RuntimeError("the reader has gone")

        def end(self):
            pass

    with pytest.raises(RuntimeError, match="the reader has gone"):
        engine.generate(ids[:1], max_new_tokens=12, streamer=Broken())
    assert torch.equal(engine.generate(ids, max_new_tokens=12), want)


def test_choices_are_told_apart():
    def key(k=5, do_sample=True, pad=None):
        return TokenChooser(
            LogitsProcessorList([TopKLogitsWarper(k)]), [], do_sample, pad, TensorParallel(), torch.device("cpu")
        ).key()

    assert key() == key()
    assert len({key(), key(k=6), key(do_sample=False), key(pad=torch.tensor(1))}) == 4


def test_a_selector_of_the_test_sees_every_step(device):
    """The device's loop takes one step less than it makes tokens: the first come from the prefill."""
    engine = engine_of(predictors=False)
    fix_selection(engine, mlp=lambda i: [torch.ones(77, dtype=torch.bool, device=device)])
    engine.generate(prompt(device=device), max_new_tokens=9)
    steps = [block.mlp.selector.step for block in engine.blocks]
    assert all(isinstance(block.mlp.selector, FixedSelector) for block in engine.blocks)
    assert steps == [8] * len(steps)
