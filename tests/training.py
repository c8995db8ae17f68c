"""A tiny model and text that the tests of training share."""

from types import SimpleNamespace

import torch
from transformers import OPTConfig, OPTForCausalLM

from dejavu_ds.predictor import PredictorSet
from dejavu_ds.taps import UNITS

QUICK = {
    "rank": 16, "epochs": 4, "patience": 4, "context": 32, "buffer_tokens": 1024, "batch_tokens": 128,
    "learning_rate": 1e-2,
}  # fmt: skip


class WordTokenizer:
    """A document is a row of token ids."""

    bos_token_id = 2
    eos_token_id = 2

    def __call__(self, documents, **_):
        return SimpleNamespace(input_ids=[[int(word) for word in text.split()] for text in documents])

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def tiny_model(**overrides) -> OPTForCausalLM:
    """Three layers, D 32, F 64, 8 heads, a sparse ReLU."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 8, **overrides}
    config = OPTConfig(**sizes, num_hidden_layers=3, vocab_size=60, max_position_embeddings=64, init_std=0.15)
    model = OPTForCausalLM(config).eval()
    for layer in model.model.decoder.layers:
        layer.fc1.bias.data.fill_(-0.8)
    return model


def token_rows() -> list[str]:
    """60 documents of 80 tokens."""
    rows = torch.randint(3, 60, (60, 80), generator=torch.Generator().manual_seed(1)).tolist()
    return [" ".join(map(str, row)) for row in rows]


def tensors_of(predictors: PredictorSet) -> list[torch.Tensor]:
    """Every tensor of a set."""
    kept = [p for unit in UNITS for p in predictors.of(unit) if p is not None]
    return [t for p in kept for t in (*p.parameters(), p.quantiles)]
