"""Calibration text: from files to windows of token ids."""

import json
import os
from pathlib import Path

import torch


def read_documents(path: str | os.PathLike, samples: int | None = None) -> list[str]:
    """Return the first `samples` documents (None: all) of a .jsonl or .txt file.

    .jsonl: one JSON object a line with a "text" field. .txt: documents are separated by blank lines.
    Raises ValueError for a missing file, another suffix, a line without text, or a file without documents.
    """
    path = Path(path)
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if path.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"{path}: expected a .jsonl or .txt file, got suffix {path.suffix!r}")
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; pass a .jsonl or .txt file of text") from error
    if path.suffix == ".txt":
        documents = ["\n".join(lines) for lines in _paragraphs(content)]
    else:
        # Not splitlines: it also splits at characters that may stand inside a JSON string.
        lines = enumerate(content.split("\n"), start=1)
        documents = [_text_of(line, f"{path} line {number}") for number, line in lines if line.strip()]
    documents = [document for document in documents if document.strip()][:samples]
    if not documents:
        raise ValueError(f"{path} holds no text: pass a file with documents")
    return documents


def split_documents(documents: list[str], validation_share: float) -> tuple[list[str], list[str]]:
    """(training, validation): the last documents, at least one, are for validation.

    Whole documents, because two halves of one are too alike. Raises ValueError for fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(f"need at least 2 documents, one of them for validation, got {len(documents)}")
    count = min(len(documents) - 1, max(1, round(validation_share * len(documents))))
    return documents[:-count], documents[-count:]


def token_ids(documents: list[str], tokenizer) -> torch.Tensor:
    """The documents' tokens in one row, [n] int64, with the bos token before each document."""
    bos = tokenizer.bos_token_id
    if bos is None:
        raise ValueError("the tokenizer has no bos_token_id, which starts every document: set tokenizer.bos_token")
    ids = []
    for tokens in tokenizer(documents, add_special_tokens=False, verbose=False).input_ids:
        ids += [bos, *tokens]
    return torch.tensor(ids)


def cut_windows(ids: torch.Tensor, context: int) -> torch.Tensor:
    """[n] -> [n // context, context]; the rest is dropped. Raises ValueError if not one window is full."""
    count = len(ids) // context
    if count == 0:
        raise ValueError(f"{len(ids)} tokens do not fill one window of {context}: give more text or a smaller context")
    return ids[: count * context].view(count, context)


def _paragraphs(content: str) -> list[list[str]]:
    """Runs of lines that are not blank."""
    runs = [[]]
    for line in content.splitlines():
        if line.strip():
            runs[-1].append(line)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{where}: expected an object with a "text" string')
    return record["text"]
