import copy
import json

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from dejavu_ds.fingerprint import check_fingerprint, fingerprint


def tiny_opt(seed: int, **changes) -> OPTForCausalLM:
    sizes = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 40, "num_attention_heads": 3}
    sizes |= {"num_hidden_layers": 3, "vocab_size": 50, "max_position_embeddings": 32}
    torch.manual_seed(seed)
    return OPTForCausalLM(OPTConfig(**(sizes | changes))).eval()


def test_is_json_and_leaks_no_path():
    model = tiny_opt(0)
    model.config._name_or_path = "/home/someone/models/opt-tiny/"
    text = json.dumps(fingerprint(model))
    assert "someone" not in text
    assert json.loads(text)["name"] == "opt-tiny"
    check_fingerprint(json.loads(text), fingerprint(model))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.float16, torch.bfloat16])
def test_same_checkpoint_in_any_dtype(stored, loaded):
    model = tiny_opt(0)
    check_fingerprint(fingerprint(copy.deepcopy(model).to(stored)), fingerprint(copy.deepcopy(model).to(loaded)))


def test_other_weights_of_equal_sizes():
    ours, other = fingerprint(tiny_opt(0)), fingerprint(tiny_opt(1))
    ours["name"], other["name"] = "ours", "other"
    with pytest.raises(ValueError, match=r"'ours'.*'other'.*weights of .*fc1.*launch/train_predictors\.py"):
        check_fingerprint(ours, other)


def test_one_layer_of_another_training_run():
    model = tiny_opt(0)
    before = fingerprint(model)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.model.decoder.layers[2].fc2.weight, std=0.02)
    with pytest.raises(ValueError, match=r"weights of 2\.fc2 "):
        check_fingerprint(before, fingerprint(model))


@pytest.mark.parametrize("change", [{"ffn_dim": 48}, {"num_hidden_layers": 4}, {"num_attention_heads": 4}])
def test_other_sizes_are_named(change):
    (field, value), expected = next(iter(change.items())), fingerprint(tiny_opt(0))
    with pytest.raises(ValueError, match=rf"{field} {expected['config'][field]} against {value}"):
        check_fingerprint(expected, fingerprint(tiny_opt(0, **change)))


def test_nan_weights_differ():
    model = tiny_opt(0)
    before = fingerprint(model)
    model.model.decoder.layers[0].fc1.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"0\.fc1"):
        check_fingerprint(before, fingerprint(model))


def test_meta_model_reads_its_checkpoint():
    model = tiny_opt(0)
    with torch.device("meta"):
        empty = OPTForCausalLM(model.config)
    with pytest.raises(ValueError, match="meta"):
        fingerprint(empty)
    check_fingerprint(fingerprint(model), fingerprint(empty, model.state_dict().__getitem__))
