"""OPT as its 350M size is built: norms after the units, embeddings of another width, no norm before the head."""

from itertools import pairwise

import pytest
import torch
from models import decode_logits, fix_selection, tiny_opt
from test_lookahead import LAYERS, MaskedReference, random_predictors
from test_sparse import random_masks
from training import QUICK, WordTokenizer, tiny_model, token_rows

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.block import PerToken
from dejavu_ds.collect import Collector, tap_input
from dejavu_ds.masked import masking
from dejavu_ds.observe import observe
from dejavu_ds.taps import LOOKAHEADS, tap_of
from dejavu_ds.train import TrainConfig, train_predictors

CLOSE = {"atol": 3e-4, "rtol": 3e-4}
VARIANTS = {
    "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "post-norm": {"do_layer_norm_before": False},
    "projected": {"word_embed_proj_dim": 24},
    "untied": {"do_layer_norm_before": False, "word_embed_proj_dim": 24, "tie_word_embeddings": False},
    "no final norm": {"_remove_final_layer_norm": True},
}
variants = pytest.mark.parametrize("name", VARIANTS)


def random_ids(B, S, device, seed=1):
    return torch.randint(3, 131, (B, S), generator=torch.Generator().manual_seed(seed)).to(device)


def logits_of(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def engine_of(name="350m", predictors=None, **sparsity):
    config = SparsityConfig(**sparsity) if predictors is not None else None
    return dejavu_ds.init_inference(
        tiny_opt(**VARIANTS[name]), predictors=predictors, sparsity=config, dtype=torch.float32
    )


@variants
def test_case_01_logits_and_tokens_are_hugging_faces(name, device):
    """Whole sequences, decode steps, a padded batch, greedy text and the module under Hugging Face's own forward."""
    reference, engine, ids = tiny_opt(**VARIANTS[name]).to(device), engine_of(name), random_ids(3, 14, device)
    want = logits_of(reference, ids)
    torch.testing.assert_close(engine(ids).logits, want, **CLOSE)
    torch.testing.assert_close(decode_logits(engine, ids, 5), want[:, 4:], **CLOSE)
    torch.testing.assert_close(logits_of(engine.module, ids), want, **CLOSE)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    padded = engine(ids, attention_mask=mask).logits
    torch.testing.assert_close(
        padded[mask.bool()], logits_of(reference, ids, attention_mask=mask)[mask.bool()], **CLOSE
    )
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(engine.generate(ids, **options), reference.generate(ids, **options))


def test_hidden_states_and_embeddings(device):
    reference, engine, ids = tiny_opt(**VARIANTS["350m"]).to(device), engine_of(), random_ids(2, 9, device)
    with torch.no_grad():
        want = reference(ids, output_hidden_states=True).hidden_states
    got = engine(ids, output_hidden_states=True).hidden_states
    assert len(got) == LAYERS + 1
    # Hugging Face's last entry is projected back to the embeddings' width, which belongs to the head here.
    for ours, theirs in zip(got[:-1], want[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    embeds = engine.module.get_input_embeddings()(ids)
    assert embeds.shape[-1] == 24
    torch.testing.assert_close(engine(inputs_embeds=embeds).logits, logits_of(reference, ids), **CLOSE)


@pytest.mark.parametrize("mode", ["gather", "masked"])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_decode_uses_the_tap_of_its_lookahead(lookahead, mode, device):
    ids, model = random_ids(2, 30, device), tiny_opt(**VARIANTS["350m"])
    predictors = random_predictors(model, lookahead)
    for p in (*predictors.mlp, *predictors.heads):
        p.to(device)
    want = MaskedReference(model.to(device), predictors, {"mlp": 0.5, "heads": 0.5}, start=8)(ids)[:, 7:]
    engine = engine_of(predictors=predictors, mode=mode, recovery_window=6)
    torch.testing.assert_close(decode_logits(engine, ids, 8), want, **CLOSE)
    report = engine.stats.report()
    assert 0.2 < report.mlp_density < 0.98 and 0.2 < report.head_density < 0.98


def test_masked_at_every_position(device):
    ids, model = random_ids(1, 20, device), tiny_opt(**VARIANTS["350m"]).to(device)
    predictors = random_predictors(model, "half")
    for p in (*predictors.mlp, *predictors.heads):
        p.to(device)
    got = engine_of(predictors=predictors)(ids, use_cache=False, per_token=PerToken()).logits
    with masking(model, predictors, {"mlp": 0.5, "heads": 0.5}):
        torch.testing.assert_close(got, logits_of(model, ids), **CLOSE)
    want = MaskedReference(model, predictors, {"mlp": 0.5, "heads": 0.5}, start=0)(ids)
    torch.testing.assert_close(got, want, **CLOSE)


def test_missing_keys_are_made_up_from_the_stream(device):
    ids = random_ids(2, 40, device)

    def run(masked):
        engine = engine_of()
        fix_selection(
            engine,
            heads=lambda i: random_masks(3, 32, 0.3, 10 + i, device),
            mlp=lambda i: random_masks(77, 32, 0.5, 20 + i, device),
            masked=masked,
            window=20,
        )
        return decode_logits(engine, ids, 8)

    torch.testing.assert_close(run(False), run(True), **CLOSE)


@torch.no_grad()
def test_taps_are_what_the_units_read(device):
    """The formula of a post-norm block, from the streams that Hugging Face reports."""
    model, windows = tiny_opt(**VARIANTS["350m"]).to(device), random_ids(3, 16, device)
    records = Collector(model, 48).collect(windows)
    hidden = model.model(windows, output_hidden_states=True).hidden_states
    for layer, record in enumerate(records):
        block = model.model.decoder.layers[layer]
        x = hidden[layer].flatten(0, 1)
        torch.testing.assert_close(record.attention.float(), x, rtol=2e-3, atol=2e-3)
        mlp = block.self_attn_layer_norm(x + block.self_attn.out_proj(record.head_outputs.float()))
        torch.testing.assert_close(record.mlp.float(), mlp, rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(record.activation.float(), torch.relu(block.fc1(mlp)), rtol=2e-2, atol=2e-2)


def test_observations_follow_the_stream(device):
    """The cosine between a block's input and output, from Hugging Face's hidden states."""
    windows, model = random_ids(2, 16, device), tiny_opt(**VARIANTS["post-norm"]).to(device)
    with torch.no_grad():
        hidden = model(windows, output_hidden_states=True).hidden_states
    want = [torch.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairwise(hidden)]
    got = observe(engine_of("post-norm"), windows, [0.5] * LAYERS, batch_sizes=(1, 2))
    assert got.cosine == pytest.approx(want, abs=1e-4)


def test_training_and_running_what_was_trained():
    """Predictors of a post-norm model find what is active, far above chance, and its engine takes them."""
    model = tiny_model(do_layer_norm_before=False, word_embed_proj_dim=20)
    config = TrainConfig(**QUICK, head_label_density=0.25)
    trained = train_predictors(model, WordTokenizer(), token_rows(), config, "rows")
    records = Collector(model, 1024).collect(torch.randint(3, 60, (32, 32), generator=torch.Generator().manual_seed(9)))
    for layer in (1, 2):
        x = tap_input(records, tap_of("mlp", layer, "half")).float()
        kept = trained.mlp[layer].logits(x) > trained.mlp[layer].threshold(0.25)
        active = records[layer].activation > 0
        assert (kept & active).sum() / active.sum() > 2 * kept.float().mean()
    engine = dejavu_ds.init_inference(model, predictors=trained, sparsity=SparsityConfig(0.3), dtype=torch.float32)
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(3)).to(engine.device)
    assert decode_logits(engine, ids, 8).isfinite().all()
    assert engine.stats.report().mlp_density < 0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision(dtype, device):
    """At most twice as far from fp32 as Hugging Face in the same dtype."""
    ids = random_ids(1, 14, device)
    exact = logits_of(tiny_opt(**VARIANTS["350m"]).to(device), ids)
    theirs = (logits_of(tiny_opt(**VARIANTS["350m"]).to(device, dtype), ids) - exact).abs().max()
    engine = dejavu_ds.init_inference(tiny_opt(**VARIANTS["350m"]), dtype=dtype)
    assert 0 < (engine(ids).logits - exact).abs().max() <= 2 * theirs
    assert (decode_logits(engine, ids, 8) - exact[:, 7:]).abs().max() <= 2 * theirs
