"""The two files of a predictor set, on disk and on the hub: predictors.safetensors and predictors.json.

No pickle: reading a set runs no code. Whatever is wrong with the files is found here or in
`dejavu_ds.predictor`, before the set is used, as a ValueError that names the file and the way out.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from dejavu_ds.resume import replace_file
from dejavu_ds.tensor_files import check_header

WEIGHTS_FILE = "predictors.safetensors"
CONFIG_FILE = "predictors.json"
FORMAT, VERSION = "dejavu_ds.predictors", 1
WAY_OUT = "train a set with launch/train_predictors.py"
_HASHED_AT_A_TIME = 2**22
_SECTIONS = {"lookahead": str, "predictors": dict, "budgets": dict, "fingerprint": dict, "metadata": dict}


def write(folder: str | os.PathLike, content: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Write `content` (the sections of the JSON file) and `tensors` into `folder`, made if need be.

    Raises ValueError for a tensor that is not finite, or a disk that does not take the files.
    """
    check_finite(tensors)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The JSON file goes first and comes last, so that a set with one is whole, whenever the program is stopped.
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    # Not save_file: it makes a file that only its owner may read.
    data = serialize(tensors)
    replace_file(folder / WEIGHTS_FILE, data)
    checksum = hashlib.sha256(data).hexdigest()
    text = json.dumps({"format": FORMAT, "version": VERSION, "sha256": checksum, **content}, indent=1)
    replace_file(folder / CONFIG_FILE, f"{text}\n".encode())


def locate(name: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder `name`, or a snapshot of the hub repository "organisation/name"."""
    folder, name = Path(name), str(name)
    if folder.is_dir():
        return folder
    if folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.strip("/").count("/") != 1:
        raise ValueError(f"no folder {name}: pass a folder of predictors or a hub id, or {WAY_OUT} --out {name}")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[WEIGHTS_FILE, CONFIG_FILE]))
    # No network, offline mode and a refused or unknown repository are OSErrors; an impossible id is a ValueError.
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no folder {name} here, and the hub did not give a repository of that name ({type(error).__name__}: "
            f"mistyped, no access or no network): correct the name, pass a folder, or {WAY_OUT} --out {name}"
        ) from error


def read_config(path: Path) -> dict:
    """The JSON file with its sections present and of the right type."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if any(path.parent.glob("training*.safetensors")):
            raise ValueError(
                f"{path.parent} holds a training that has not ended; the command that began it goes on with it"
            ) from error
        raise ValueError(f"{path} is missing: this is no folder of predictors; {WAY_OUT}") from error
    except ValueError as error:  # also a UnicodeDecodeError
        raise ValueError(f"{path} is not JSON ({error}): copy it again or {WAY_OUT}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{path} is not of predictors: its "format" is not {FORMAT!r}; {WAY_OUT}')
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {content.get('version')}, this program reads {VERSION}: use the dejavu_ds that "
            f"wrote it, or {WAY_OUT}"
        )
    wrong = [section for section, kind in _SECTIONS.items() if not isinstance(content.get(section), kind)]
    if wrong:
        raise ValueError(f"{path} lacks or garbles {', '.join(wrong)}; {WAY_OUT}")
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The safetensors file, on the CPU; all values finite."""
    try:
        check_header(path)
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the set is incomplete; copy it again or {WAY_OUT}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}): copy it again or {WAY_OUT}") from error
    check_finite(tensors)
    return tensors


def check_sum(folder: Path, expected: object) -> None:
    """ValueError unless the weights in `folder` have the sha256 that their JSON file has; None: it was saved without.

    For what no other check finds, which say better what is wrong: a weight that is another one.
    """
    if expected is None:
        return
    path = folder / WEIGHTS_FILE
    if (found := sha256_of(path)) != expected:
        raise ValueError(
            f"{path} is not the file that was saved: its sha256 is {found}, {CONFIG_FILE} has {expected}; copy both "
            f"again or {WAY_OUT}"
        )


def sha256_of(path: str | os.PathLike) -> str:
    """Of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_HASHED_AT_A_TIME):
            digest.update(block)
    return digest.hexdigest()


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError naming the tensors with infinite or NaN values."""
    wrong = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if wrong:
        raise ValueError(f"values that are not finite in {', '.join(wrong[:5])}: {WAY_OUT}, or save in a wider dtype")
