"""Checkpoint folders in every form, written by hand from a model's tensors."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel


def write_checkpoint(
    folder: Path, model: PreTrainedModel, kind: str = "safetensors", files: int = 1, prefix: str = "model.decoder."
) -> Path:
    """The model's weights in `files` files of `kind`, "safetensors" or "bin", with an index if there are several.

    prefix  "model.decoder.", as the causal model saves itself, or "decoder.", as the model inside does
    """
    tensors = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
    if prefix == "decoder.":
        head = tensors.pop("lm_head.weight")
        if not model.config.tie_word_embeddings:
            tensors["lm_head.weight"] = head
    elif model.config.tie_word_embeddings and kind == "safetensors":  # .bin files have both, as one storage
        tensors.pop("lm_head.weight")
    elif model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"]
    tensors = {name.replace("model.decoder.", prefix): t for name, t in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    stem, suffix = ("model", ".safetensors") if kind == "safetensors" else ("pytorch_model", ".bin")
    names, weight_map = list(tensors), {}
    for i in range(files):
        file = f"{stem}-{i + 1:05}-of-{files:05}{suffix}" if files > 1 else stem + suffix
        part = {name: tensors[name] for name in names[i::files]}
        save_file(part, folder / file, {"format": "pt"}) if kind == "safetensors" else torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if files > 1:
        write_index(folder / f"{stem}{suffix}.index.json", weight_map)
    return folder


def write_index(path: Path, weight_map: object) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
