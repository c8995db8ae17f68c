"""Many prompts of `generate.py --prompt-file`: batches, a progress bar, one JSON object a prompt."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from dejavu_ds.launch.common import rank


def parse_prompts(text: str, where: str, json_lines: bool) -> list[str]:
    """The prompts of a file: its lines, or the "prompt" (or "text") strings of its JSON objects; blank lines are none.

    Raises ValueError for a line that is no such object, for an empty prompt, or for no prompt at all.
    """
    prompts = []
    # Not splitlines: it also splits at characters that may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            prompts.append(_prompt_of(line, f"{where} line {number}") if json_lines else line.rstrip("\r"))
    if not prompts:
        raise ValueError(f"{where} holds no prompt; give one a line")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    prompt = record.get("prompt", record.get("text")) if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: expected an object with a "prompt" (or "text") string')
    if not prompt.strip():
        raise ValueError(f"{where}: the prompt is empty; give some text to continue")
    return prompt


def generate_all(
    engine, tokenizer, prompts: list[str], batch_size: int, max_new_tokens: int, options: dict
) -> Iterator[list[dict]]:
    """The records of each batch, in the order of the prompts; on every rank alike.

    Raises ValueError before the first batch if any prompt is too long, with its number.
    """
    import torch

    from dejavu_ds.generation import check_length

    for number, ids in enumerate(tokenizer(prompts, verbose=False).input_ids, start=1):
        try:
            check_length(torch.arange(len(ids))[None], max_new_tokens, engine.max_positions)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    ends = engine.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends])
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        inputs = tokenizer(batch, return_tensors="pt", padding=True).to(engine.device)
        rows = engine.generate(**inputs, max_new_tokens=max_new_tokens, **options)[:, inputs.input_ids.shape[1] :].cpu()
        records = []
        for prompt, row in zip(batch, rows, strict=True):
            ended = torch.isin(row, ends).nonzero()
            # What stands after its end is padding, until the last of the batch has ended.
            row = row[: int(ended[0]) + 1] if len(ended) else row
            text = tokenizer.decode(row, skip_special_tokens=True)
            records.append({"prompt": prompt, "text": text, "new_tokens": len(row)})
        yield records


@contextmanager
def writer(out: str | None) -> Iterator[TextIO | None]:
    """Where rank 0 writes its lines, standard output without a file; None on other ranks."""
    if rank():
        yield None
    elif out is None:
        yield sys.stdout
    else:
        with Path(out).open("w", encoding="utf-8") as file:
            yield file


def write_all(batches: Iterator[list[dict]], total: int, out: str | None) -> int:
    """Write every batch's records as it is done, beside a progress bar; returns the new tokens of all."""
    from tqdm import tqdm

    new_tokens = 0
    # The first batch is made before the file is touched: what is refused leaves an older one as it was.
    first = next(batches)
    with writer(out) as file, tqdm(total=total, unit="prompt", disable=file is None) as bar:
        records = first
        while records is not None:
            new_tokens += sum(record["new_tokens"] for record in records)
            if file is not None:
                with tqdm.external_write_mode(file=file):
                    file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                    file.flush()
            bar.update(len(records))
            records = next(batches, None)
    return new_tokens
