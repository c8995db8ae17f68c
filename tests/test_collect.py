import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from dejavu_ds.collect import Collector, tap_input, watching
from dejavu_ds.taps import Tap


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 40, "num_attention_heads": 3}
    config = OPTConfig(**sizes, num_hidden_layers=3, vocab_size=50, max_position_embeddings=64, init_std=0.2)
    return OPTForCausalLM(config).eval()


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@torch.no_grad()
def test_records_are_what_the_layers_compute(model):
    windows = torch.randint(3, 50, (5, 16))
    records = Collector(model, 80).collect(windows)
    hidden = model.model(windows, output_hidden_states=True).hidden_states
    for layer, record in enumerate(records[:-1]):  # transformers normalises the last hidden state once more
        block = model.model.decoder.layers[layer]
        attention = block.self_attn_layer_norm(hidden[layer])
        mlp_stream = hidden[layer] + block.self_attn(attention, attention_mask=_causal(16))[0]
        mlp = block.final_layer_norm(mlp_stream)
        activation = torch.relu(block.fc1(mlp))
        expected = {"attention": attention, "mlp": mlp, "activation": activation}
        for field, value in expected.items():
            torch.testing.assert_close(getattr(record, field).float(), value.flatten(0, 1), rtol=2e-3, atol=2e-3)
        out = block.self_attn.out_proj(record.head_outputs.float()).view_as(mlp)
        torch.testing.assert_close(out, mlp_stream - hidden[layer], rtol=5e-3, atol=5e-3)
        norm = hidden[layer + 1].square().sum(-1).flatten()
        torch.testing.assert_close(record.residual, norm, rtol=1e-4, atol=1e-5)


def _causal(size: int) -> torch.Tensor:
    return torch.full((size, size), float("-inf")).triu(1)[None, None]


def test_tap_input_reads_layer_and_point(model):
    records = Collector(model, 16).collect(torch.randint(3, 50, (1, 16)))
    assert tap_input(records, Tap(1, "mlp")) is records[1].mlp
    assert tap_input(records, Tap(2, "attention")) is records[2].attention


def test_rounds_reuse_the_buffers(model):
    collector = Collector(model, 64)
    first = collector.collect(torch.randint(3, 50, (4, 16)))
    second = collector.collect(torch.randint(3, 50, (2, 16)))
    assert len(first[0]) == 64 and len(second[0]) == 32
    assert all(a.activation.data_ptr() == b.activation.data_ptr() for a, b in zip(first, second, strict=True))
    with pytest.raises(ValueError, match="80 tokens do not fit buffers of 64"):
        collector.collect(torch.randint(3, 50, (5, 16)))


def test_one_unit_alone(model):
    windows = torch.randint(3, 50, (4, 16))
    both = [vars(record).copy() for record in Collector(model, 64).collect(windows)]
    for unit, field, other in (("heads", "head_outputs", "activation"), ("mlp", "activation", "head_outputs")):
        for alone, record in zip(Collector(model, 64, units=(unit,)).collect(windows), both, strict=True):
            assert getattr(alone, other) is None
            for name in ("attention", "mlp", "residual", field):
                assert torch.equal(getattr(alone, name), record[name])


def test_hooks_are_removed_even_by_an_error(model):
    before = hooks_of(model)  # transformers has some of its own
    with watching(model, lambda *_: None):
        assert hooks_of(model) == before + 15
    assert hooks_of(model) == before

    def fail(*_):
        raise RuntimeError("sink")

    with pytest.raises(RuntimeError, match="sink"), watching(model, fail):
        model(torch.tensor([[2, 3]]))
    assert hooks_of(model) == before
    with pytest.raises(IndexError):  # a token that the vocabulary lacks
        Collector(model, 8).collect(torch.tensor([[2, 99]]))
    assert hooks_of(model) == before
