"""A training's state on disk, so that one which was stopped goes on where it was.

One file, safetensors with a JSON text in its header (no pickle): it is written under another name and then put in
place in one step, so what is there is whole, whenever the program is killed and even if the disk is full.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

CHECKPOINT_FILE = "training.safetensors"
_KEY = "dejavu_ds.training"
_VERSION = 1


def checkpoint_path(folder: str | os.PathLike, rank: int = 0, size: int = 1) -> Path:
    """The file of one process; ValueError if the folder holds a checkpoint of another number of processes."""
    names = [CHECKPOINT_FILE] if size == 1 else [f"training.{n}-of-{size}.safetensors" for n in range(size)]
    strangers = sorted(path.name for path in Path(folder).glob("training*.safetensors") if path.name not in names)
    if strangers:
        raise ValueError(
            f"{folder} holds {strangers[0]}, of a training with another number of processes than {size}: go on with as "
            "many, remove the file, or train into another folder"
        )
    return Path(folder) / names[rank]


def write_checkpoint(
    path: Path, content: dict, tensors: dict[str, torch.Tensor], ready: Callable[[], None] = lambda: None
) -> None:
    """Replace the file by `content` (plain numbers, strings, lists) and `tensors`.

    ready  called between writing and putting in place: a barrier keeps the files of several processes together
    Raises ValueError if the disk does not take it; an older file is then still whole.
    """
    header = {_KEY: json.dumps({"version": _VERSION, **content})}
    replace_file(path, serialize({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, header), ready)


def read_checkpoint(path: Path) -> tuple[dict, dict[str, torch.Tensor]] | None:
    """(content, tensors), or None if there is no file; ValueError for one that is not of a training."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            content = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is corrupt ({error}): remove it to train from the start") from error
    if not isinstance(content, dict) or content.pop("version", None) != _VERSION:
        raise ValueError(f"{path} is no checkpoint that this program reads: remove it to train from the start")
    return content, tensors


def check_same_arguments(path: Path, stored: dict, given: dict) -> None:
    """Raise ValueError naming each argument that is not what the checkpoint was made with."""
    given = json.loads(json.dumps(given))
    differences = [
        f"{name} {stored.get(name)!r} then, {given.get(name)!r} now"
        for name in sorted(stored.keys() | given.keys())
        if stored.get(name) != given.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path} is of a training with other arguments: {'; '.join(differences)}. Go on with those of then, remove "
            "the file, or train into another folder"
        )


def replace_file(path: Path, content: bytes, ready: Callable[[], None] = lambda: None) -> None:
    """Put `content` in place in one step, after `ready()`; ValueError for a disk that does not take it."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        ready()
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ValueError(
            f"cannot write {path} ({len(content):,} bytes): {error.strerror}; make room or choose another folder"
        ) from error
