"""What generations and engines leave behind: nothing that grows, and nothing of an engine that is let go."""

import gc
import tracemalloc
import weakref

import pytest
import torch
from models import tiny_opt
from test_lookahead import random_predictors

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.decode import decode_one_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def engine_of(seed=0, sparse=True, **kwargs):
    model = tiny_opt(seed, num_hidden_layers=2)
    if sparse:
        predictors = random_predictors(model, "half")
        predictors.mlp, predictors.heads = predictors.mlp[:2], predictors.heads[:2]
        for unit in ("mlp", "heads"):
            rows = [row[:2] for row in predictors.budgets[unit]["rows"]]
            predictors.budgets[unit] = {**predictors.budgets[unit], "rows": rows}
        kwargs |= {"predictors": predictors, "sparsity": SparsityConfig(0.5, 0.5, recovery_window=5)}
    return dejavu_ds.init_inference(model, **{"dtype": torch.float32, **kwargs})


def ids_of(B=1, S=5, seed=0):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensors() -> tuple[int, int]:
    """(number, bytes) of the storages of all tensors that Python knows."""
    gc.collect()
    found = (obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor) and not obj.is_meta)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return len(storages), sum(storages.values())


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.1}], ids=["device's loop", "host's loop"])
def test_ten_thousand_tokens_leave_nothing(options):
    """In generations of 125, twenty sequences at a time: tensors, Python's own memory and the collector's objects."""
    engine = engine_of()
    options = {"max_new_tokens": 125, "do_sample": False, "eos_token_id": None, **options}

    def generate(times: int) -> None:
        for seed in range(times):
            engine.generate(ids_of(20, seed=seed), **options)

    generate(1)
    tracemalloc.start()
    try:
        before, memory, objects = tensors(), tracemalloc.get_traced_memory()[0], len(gc.get_objects())
        generate(4)
        after, memory_after, objects_after = tensors(), tracemalloc.get_traced_memory()[0], len(gc.get_objects())
    finally:
        tracemalloc.stop()
    assert after == before
    # An integer a token would take 280,000 bytes; Python's and torch's own lists of free objects fill up a little.
    assert memory_after - memory < 40_000 and objects_after - objects < 100


def test_one_long_run_of_steps_leaves_nothing():
    """Hundreds of steps in one cache, moved back where it is full: no tensor more than before."""
    engine = engine_of()
    cache = engine.new_cache(1, 300)
    engine(ids_of(), past_key_values=cache)
    tokens = ids_of(S=1)[:, 0]
    engine.decode_one_token(tokens, cache)
    before = tensors()
    for _ in range(500):
        if cache.length == cache.capacity:
            cache.crop(5)
        decode_one_token(engine.module, engine.policy, cache, tokens)
        cache.length += 1
    assert tensors() == before


@pytest.mark.parametrize("sparse", [True, False])
def test_a_freed_engine_gives_its_memory_back(sparse):
    engine_of(sparse=sparse).generate(ids_of(), max_new_tokens=4)  # what is made once in a process
    before = tensors()
    engine = engine_of(sparse=sparse)
    engine.generate(ids_of(2), max_new_tokens=10)
    kept = engine.generate(ids_of(), max_new_tokens=4, return_dict_in_generate=True)
    weights = sum(p.nbytes for p in engine.module.parameters())
    assert tensors()[1] >= before[1] + weights
    watched = [weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine.blocks[0])]
    del engine, kept
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3
    number, size = tensors()
    assert number <= before[0] + 2 and size <= before[1] + 100


def test_engines_that_are_made_and_freed_do_not_add_up():
    engine_of()
    before = tensors()
    for seed in range(4):
        engine_of(seed).generate(ids_of(), max_new_tokens=4)
    assert tensors()[0] <= before[0] + 2


def test_two_engines_take_turns():
    """Sparse and dense, of different weights, token by token in caches of their own; then one of them goes."""
    first, second = engine_of(1), engine_of(2, sparse=False)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    want = [engine.generate(ids_of(), **options) for engine in (first, second)]
    caches = [engine.new_cache(1, 20) for engine in (first, second)]
    tokens = []
    for engine, cache in zip((first, second), caches, strict=True):
        tokens.append([engine(ids_of(), past_key_values=cache).logits[:, -1].argmax(-1)])
    for _ in range(11):
        for engine, cache, made in zip((first, second), caches, tokens, strict=True):
            made.append(engine.decode_one_token(made[-1], cache).argmax(-1))
    for made, text in zip(tokens, want, strict=True):
        assert torch.equal(torch.stack(made, 1), text[:, 5:])
    del first, caches, engine, cache
    gc.collect()
    assert torch.equal(second.generate(ids_of(), **options), want[1])
    with torch.no_grad():
        dense = tiny_opt(2, num_hidden_layers=2).to(DEVICE).generate(ids_of(), **options)
    assert torch.equal(want[1], dense)


def test_an_error_leaves_nothing(monkeypatch):
    engine = engine_of()
    engine.generate(ids_of(), max_new_tokens=4)

    def fail():
        with pytest.raises(ValueError, match="no token can be chosen"):
            engine.generate(ids_of(), do_sample=True, temperature=1e-40, max_new_tokens=4)

    fail()
    before = tensors()
    for _ in range(5):
        fail()
    assert tensors() == before
