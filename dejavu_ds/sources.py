"""Calibration text from elsewhere than a file: a data set of the hub, or the model itself."""

import re

import torch
from torch import nn
from tqdm import tqdm

from dejavu_ds.text import read_documents

# Sampled side by side.
_BATCH = 32


def documents_of(data: str, samples: int | None) -> list[str]:
    """The first `samples` documents of a .jsonl or .txt file, or of the hub data set `data`.

    A hub data set is named "organisation/name", "organisation/name:split" or "organisation/name:configuration:split";
    the split is "train" if none is named. Its rows must have a "text" field.
    Raises ValueError for what cannot be read.
    """
    name, *rest = str(data).split(":")
    if len(rest) > 2 or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) or name.endswith((".jsonl", ".txt")):
        return read_documents(data, samples)
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{data} is no .jsonl or .txt file; to read it as a data set of the hub, install datasets "
            "(pip install datasets)"
        ) from error
    configuration, split = ([None] * (2 - len(rest)) + rest) if len(rest) < 2 else rest
    try:
        rows = datasets.load_dataset(name, configuration, split=split or "train", streaming=True)
        documents = _texts(rows, samples)
    # What a hub, a network or a data set's reader raises is of many kinds.
    except Exception as error:
        raise ValueError(f"cannot read the data set {data} from the hub ({type(error).__name__}: {error})") from error
    if not documents:
        raise ValueError(f'the data set {data} has no rows with text in a field "text"')
    return documents


def _texts(rows, samples: int | None) -> list[str]:
    """The first `samples` texts that are not blank; rows are read no further than that."""
    documents = []
    for row in rows:
        text = row.get("text")
        if isinstance(text, str) and text.strip():
            documents.append(text)
        if len(documents) == samples:
            break
    return documents


@torch.no_grad()
def sampled_documents(model: nn.Module, tokenizer, samples: int, length: int, seed: int) -> list[str]:
    """Up to `samples` passages of at most `length` tokens that the model itself writes, at temperature 1.

    Text of the very distribution that the model generates, for when there is no other. Each starts from the bos token
    and ends with the eos token, if one comes; empty ones are left out. Seeded: the same model, seed and machine give
    the same passages.
    Raises ValueError for a model that writes nothing, or has not so many positions.
    """
    if not 2 <= length <= model.config.max_position_embeddings:
        raise ValueError(
            f"passages of {length} tokens: need 2 to {model.config.max_position_embeddings}, the model's positions"
        )
    if tokenizer.bos_token_id is None:
        raise ValueError("the tokenizer has no bos_token_id, which starts every passage: set tokenizer.bos_token")
    documents = []
    # transformers draws from the global generators: they are seeded here and put back afterwards.
    with torch.random.fork_rng(), tqdm(total=samples, unit="passage", desc="sampling") as bar:
        torch.manual_seed(seed)
        for start in range(0, samples, _BATCH):
            count = min(_BATCH, samples - start)
            for row in _sample(model, tokenizer, count, length).tolist():
                end = row.index(tokenizer.eos_token_id, 1) if tokenizer.eos_token_id in row[1:] else len(row)
                documents.append(tokenizer.decode(row[1:end], skip_special_tokens=True))
            bar.update(count)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError("the model ends every passage at once: give text with --data")
    return documents


def _sample(model: nn.Module, tokenizer, count: int, length: int) -> torch.Tensor:
    """[count, up to length] token ids, the first is bos; after eos comes eos."""
    start = torch.full((count, 1), tokenizer.bos_token_id, device=model.device)
    eos = tokenizer.eos_token_id
    # The distribution itself: no top-k, which is 50 by default, no top-p and no temperature.
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_length": 0}
    return model.generate(
        start, attention_mask=torch.ones_like(start), max_length=length, eos_token_id=eos, pad_token_id=eos, **plain
    )
