"""The sparse decode step against dense arithmetic: oracles, gather and masked, missing keys and values."""

import pytest
import torch
from models import decode_logits, fix_selection, tiny_opt

import dejavu_ds
from dejavu_ds.kernels.ops import TORCH, TRITON

# fp32 sums in another order; logits are of order 1.
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def engine_of(model, device, ops=None):
    """A dense engine over the model; `ops` forces the kernels' torch twins or, interpreted, the kernels."""
    engine = dejavu_ds.init_inference(model.to(device), dtype=torch.float32)
    if ops is not None:
        for block in engine.blocks:
            block.attention._ops = block.mlp._ops = ops
    return engine


@pytest.fixture
def ops(device):
    """What an engine takes on this device."""
    return TRITON if device == "cuda" else TORCH


def tokens(B, S, seed=0, vocab=131, device="cpu"):
    return torch.randint(3, vocab, (B, S), generator=torch.Generator().manual_seed(seed)).to(device)


def random_masks(n, steps, density, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(n, generator=generator) < density).to(device) for _ in range(steps)]


def hf_logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("B", [1, 3])
def test_keeping_everything_is_dense(B, ops, device):
    ids = tokens(B, 14, device=device)
    want = hf_logits(tiny_opt().to(device), ids)[:, 7:]
    engine = engine_of(tiny_opt(), device, ops)
    fix_selection(
        engine,
        heads=lambda i: [torch.ones(3, dtype=torch.bool, device=device)],
        mlp=lambda i: [torch.ones(77, dtype=torch.bool, device=device)],
    )
    torch.testing.assert_close(decode_logits(engine, ids, 8), want, **TOLERANCE)


@pytest.mark.parametrize("B", [1, 3])
def test_sets_that_cover_the_positive_units_are_dense(B, ops, device):
    """ReLU makes an inactive neuron and a neuron left out the same; the sets come from Hugging Face's activations."""
    reference, ids, start = tiny_opt().to(device), tokens(B, 14, device=device), 8
    active = {}
    for i, layer in enumerate(reference.model.decoder.layers):
        layer.fc1.register_forward_hook(lambda m, a, out, i=i: active.__setitem__(i, out.view(B, -1, 77) > 0))
    want = hf_logits(reference, ids)[:, start - 1 :]
    engine = engine_of(tiny_opt(), device, ops)
    fix_selection(engine, mlp=lambda i: list(active[i][:, start:].any(0)))
    share = torch.stack([active[i][:, start:].any(0).float().mean() for i in range(3)]).mean()
    assert share < 0.95, "the sets must leave neurons out for the test to say anything"
    torch.testing.assert_close(decode_logits(engine, ids, start), want, **TOLERANCE)


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("density", [0.0, 0.3, 0.8])
def test_gather_equals_masked(B, density, ops, device):
    ids = tokens(B, 24, device=device)

    def run(masked, ops):
        engine = engine_of(tiny_opt(), device, ops)
        fix_selection(
            engine,
            heads=lambda i: random_masks(3, 16, density, 10 + i, device),
            mlp=lambda i: random_masks(77, 16, density, 20 + i, device),
            masked=masked,
            window=5,
        )
        return decode_logits(engine, ids, 8)

    torch.testing.assert_close(run(False, ops), run(True, TORCH), **TOLERANCE)


def test_heads_in_turn_over_40_tokens(ops, device):
    """What a head missed is made up when it returns: the logits are those with every head's K/V at every step."""
    ids = tokens(2, 50, device=device)
    sets = [torch.tensor([True, False, True]), torch.tensor([False, True, False])]
    sets = [s.to(device) for s in sets]

    def run(masked, ops):
        engine = engine_of(tiny_opt(), device, ops)
        fix_selection(engine, heads=lambda i: [sets[(t + i) % 2] for t in range(40)], masked=masked, window=64)
        return decode_logits(engine, ids, 10)

    torch.testing.assert_close(run(False, ops), run(True, TORCH), **TOLERANCE)


@pytest.mark.parametrize("window", [1, 7, 128, 400])
def test_a_head_idle_for_300_tokens(window, device):
    ids = tokens(1, 320, device=device)
    idle = torch.tensor([True, False, True], device=device)
    every = torch.ones(3, dtype=torch.bool, device=device)

    def run(masked):
        engine = engine_of(tiny_opt(), device)
        fix_selection(engine, heads=lambda i: [idle] * 300 + [every], masked=masked, window=window)
        return decode_logits(engine, ids, 10)

    got, want = run(False), run(True)
    assert not torch.allclose(want[:, -1], hf_logits(tiny_opt().to(device), ids)[:, -1], **TOLERANCE)
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_a_prefill_after_sparse_steps_sees_every_key(device):
    """A chat turn: several new tokens over a cache in which heads have missed some."""
    ids = tokens(2, 40, device=device)
    idle = torch.tensor([True, False, False], device=device)

    def run(masked):
        engine = engine_of(tiny_opt(), device)
        fix_selection(engine, heads=lambda i: [idle], masked=masked, window=16)
        cache = engine.new_cache(2, 8)
        engine(input_ids=ids[:, :8], past_key_values=cache)
        for t in range(8, 20):
            engine(input_ids=ids[:, t : t + 1], past_key_values=cache)
        return engine(input_ids=ids[:, 20:], past_key_values=cache).logits

    torch.testing.assert_close(run(False), run(True), **TOLERANCE)


def test_memory_of_kept_inputs_does_not_grow_with_the_context(device):
    engine = engine_of(tiny_opt(), device)
    every = torch.ones(3, dtype=torch.bool, device=device)
    dense = engine.new_cache(2, 300).nbytes()
    fix_selection(engine, heads=lambda i: [every], window=16)
    extra = engine.new_cache(2, 300).nbytes() - dense
    assert extra == 3 * 2 * (16 + 1) * 60 * 4  # layers, sequences, window and the new one, hidden size, bytes
    assert engine.new_cache(2, 900).nbytes() - 3 * dense == extra


@pytest.mark.parametrize("B", [1, 2])
def test_the_kernels_in_the_engine(B, device):
    """The Triton kernels behind a whole step; on a CPU they are interpreted, so the run is short."""
    ids = tokens(B, 11, device=device)

    def run(masked, ops):
        engine = engine_of(tiny_opt(num_hidden_layers=2), device, ops)
        fix_selection(
            engine,
            heads=lambda i: random_masks(3, 8, 0.5, 10 + i, device),
            mlp=lambda i: random_masks(77, 8, 0.3, 20 + i, device),
            masked=masked,
            window=3,
        )
        return decode_logits(engine, ids, 5)

    torch.testing.assert_close(run(False, TRITON), run(True, TORCH), **TOLERANCE)
