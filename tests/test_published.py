"""Every published OPT by its own widths: against Hugging Face where one layer is small, else by its parts."""

import pytest
import torch
from models import tiny_opt
from transformers import OPTConfig, OPTForCausalLM

import dejavu_ds
from dejavu_ds.bench.shapes import SHAPES
from dejavu_ds.checks import check_model
from dejavu_ds.injection_policies import policy_for
from dejavu_ds.quantize import QuantizeConfig

# Of facebook/opt-350m, whose norms come after the units and whose embeddings are half as wide.
OPT_350M = {
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}


def widths(name: str) -> dict:
    if name == "opt-350m":
        return OPT_350M
    shape = SHAPES[name]
    return {"hidden_size": shape.hidden, "ffn_dim": shape.ffn, "num_attention_heads": shape.heads}


@pytest.mark.parametrize("name", ["opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b"])
def test_one_layer_is_hugging_faces(name, device):
    sizes = {**widths(name), "num_hidden_layers": 1, "init_std": 0.02}
    ids = torch.randint(3, 131, (2, 6), generator=torch.Generator().manual_seed(0)).to(device)
    model = tiny_opt(**sizes).to(device)
    with torch.no_grad():
        want = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    engine = dejavu_ds.init_inference(model, dtype=torch.float32)
    torch.testing.assert_close(engine(ids).logits, want, atol=2e-4, rtol=2e-4)
    assert torch.equal(engine.generate(ids, max_new_tokens=4, do_sample=False), tokens)


@pytest.mark.parametrize("name", [*SHAPES, "opt-350m"])
def test_all_layers_fit_the_policy(name):
    """Without storage: nothing that is checked before the weights are read stands in the way, 4 bits neither."""
    config = OPTConfig(**OPT_350M, num_hidden_layers=24) if name == "opt-350m" else SHAPES[name].config()
    with torch.device("meta"):
        model = OPTForCausalLM(config)
    policy = policy_for(config)
    check_model(model, policy, on_meta=True)
    QuantizeConfig().check_rows(config.hidden_size)
    layers = policy.layers(model)
    assert len(layers) == config.num_hidden_layers
    parts = policy.parts(layers[-1])
    assert parts.fc1.weight.shape == (4 * config.hidden_size, config.hidden_size)
    assert policy.head_dim(config) * config.num_attention_heads == config.hidden_size
    assert policy.norm_first(config) == (name != "opt-350m")
