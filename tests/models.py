"""Models and texts that the tests of the engine share."""

import torch
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.config import SparsityConfig
from dejavu_ds.selection import Selector
from dejavu_ds.taps import tap_of

PROMPTS = [
    "The king sat down and",
    "She opened the letter slowly, for she knew the hand",
    "In the spring of that year the river",
    "It was",
    "The captain ordered the men to",
    "After the war, the city was rebuilt by",
    "Nobody in the village had ever seen",
    "The museum was founded in 1887 and",
    "A long road leads from the station to the old mill, where",
    "Dear sir,",
    "The species is found in",
    "When the bell rang, the children",
    "He was born in London, the son of",
    "There was no wind, and the sea",
    "The bridge over the",
    "My father told me that",
    "Scientists at the university",
    "The train was late, so",
    "Once upon a time",
    "In mathematics, a group is",
]


def tiny_opt(seed: int = 0, **overrides) -> OPTForCausalLM:
    """A random OPT in fp32, small enough for a test; nothing about its sizes is a power of two."""
    sizes = {
        "vocab_size": 131,
        "hidden_size": 60,
        "ffn_dim": 77,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 400,
        "word_embed_proj_dim": 60,
        "init_std": 0.2,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "dropout": 0.0,
    }
    sizes.update(overrides)
    if "word_embed_proj_dim" not in overrides:
        sizes["word_embed_proj_dim"] = sizes["hidden_size"]
    torch.manual_seed(seed)
    model = OPTForCausalLM(OPTConfig(**sizes)).eval()
    # Biases are zero at birth; a test that would not notice a lost bias is no test.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def bundled(dtype: torch.dtype = torch.float32):
    """The trained model that comes with the package, as Hugging Face loads it."""
    return AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=dtype).eval()


class FixedSelector(Selector):
    """The sets are given, one bool mask [N] a step, the last one repeated."""

    def __init__(self, masks: list[torch.Tensor]) -> None:
        super().__init__(masks[0].numel(), masks[0].device)
        self.masks = masks
        self.step = 0

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        self.selection.idx.fill_(2**30)  # beyond the count nothing may be used
        mask = self.masks[min(self.step, len(self.masks) - 1)]
        self.step += 1
        return mask.expand(*x.shape[:-1], -1)


def fix_selection(engine, heads=None, mlp=None, masked: bool = False, window: int = 16) -> None:
    """Give every layer of an engine fixed sets.

    heads, mlp: function of the layer number that returns a list of masks [N], or None for a dense unit.
    """
    selectors = {
        (unit, i): (FixedSelector(masks(i)), tap_of(unit, i, "none"))
        for unit, masks in (("heads", heads), ("mlp", mlp))
        if masks is not None
        for i in range(len(engine.blocks))
    }
    engine.attach(selectors, SparsityConfig(mode="masked" if masked else "gather", recovery_window=window))


def decode_logits(engine, ids: torch.Tensor, start: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Teacher-forced: prefill ids[:, :start], then one decode step a column; [B, S - start + 1, V]."""
    with torch.no_grad():
        out = engine(input_ids=ids[:, :start], attention_mask=None if mask is None else mask[:, :start])
        cache = out["cache"] if "cache" in out else out["past_key_values"]
        steps = [out.logits[:, -1]]
        for t in range(start, ids.shape[1]):
            steps.append(engine(input_ids=ids[:, t : t + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(steps, dim=1)
