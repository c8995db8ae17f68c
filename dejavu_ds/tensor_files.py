"""Single tensors out of the files of a checkpoint, which may come from anywhere and are not trusted.

Opening reads names, shapes and dtypes. What is asked for then comes through a memory map of one file at a time, so a
part of a tensor costs no more memory than itself. No code is run, no path leaves the folder, and nothing is allocated
for a size that the file itself does not have.
"""

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open

# In the order in which transformers looks for them.
_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"

# The header of a 175B model takes 0.2 MB, its index as much.
_MAX_HEADER = 16 * 2**20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WAY_OUT = "copy or download the checkpoint again"


class Entry(NamedTuple):
    """A tensor in a file, not read yet. `dtype` is the format's own name where it is no float that a model has."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | str


class TensorFiles:
    """The tensors of a checkpoint, by name.

    Args:
        files: {file: names that an index says are in it, or None for all that are}. All .safetensors or .bin.

    Raises:
        ValueError: a file that is missing, damaged, contradicts its own size or is no mere container of tensors, or
            that lacks a tensor which the index says it has.
    """

    def __init__(self, files: Mapping[Path, set[str] | None]) -> None:
        self.entries: dict[str, Entry] = {}
        self._opened: tuple[Path, Callable[[str], Any]] | None = None
        for path, names in files.items():
            if not path.is_file():
                raise ValueError(f"{path} is missing: {_WAY_OUT}")
            found = _safetensors_entries(path) if path.suffix == ".safetensors" else _bin_entries(path)
            missing = sorted((names or set()) - found.keys())
            if missing:
                raise ValueError(f"{path} lacks {missing[0]}, which its index says it has: {_WAY_OUT}")
            self.entries.update({name: found[name] for name in (found if names is None else names)})

    def part(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows (dim 0) or columns (dim 1) start..stop-1 of a tensor, mapped from the file: for a moment, to copy.

        As long as the result lives, what has been touched of its file may stay in memory.
        """
        path, shape, dtype = self.entries[name]
        if isinstance(dtype, str):
            raise ValueError(f"{name} in {path} has dtype {dtype}: only weights of 16 or 32 bits are taken")
        stop = shape[dim] if stop is None and shape else stop
        if start == stop:
            return torch.empty([0 if d == dim else size for d, size in enumerate(shape)], dtype=dtype)
        if self._opened is None or self._opened[0] != path:
            self._opened = None  # before the next one is mapped
            self._opened = path, _reader(path)
        tensor = self._opened[1](name)
        if not shape:
            return tensor[...]
        return tensor[(slice(None),) * dim + (slice(start, stop),)]

    def close(self) -> None:
        """Let go of the file that is mapped; it is mapped again at need."""
        self._opened = None


def find(name: str) -> TensorFiles:
    """The weights of a folder, or of a hub repository, of which only the files needed are fetched.

    Raises ValueError where there are none, or as `TensorFiles`; for an index also if it is no list of names or names
    files elsewhere than beside it.
    """
    folder = Path(name)
    for file in (_SAFETENSORS, _BIN):
        if (path := _fetch(folder, name, file)) is not None:
            return TensorFiles({path: None})
        if (path := _fetch(folder, name, file + _INDEX_SUFFIX)) is not None:
            files: dict[Path, set[str] | None] = {}
            for shard, names in _read_index(path, Path(file).suffix).items():
                location = _fetch(folder, name, shard)
                if location is None:
                    raise ValueError(f"{path} names {shard}, which is missing: {_WAY_OUT}")
                files[location] = names
            return TensorFiles(files)
    unreachable = "" if folder.is_dir() else "; or the hub cannot be reached and they are not in the cache"
    raise ValueError(
        f"no weights at {name!r}: expected {_SAFETENSORS} or {_BIN}, or the {_INDEX_SUFFIX} of either with its files"
        f"{unreachable}"
    )


def _fetch(folder: Path, name: str, file: str) -> Path | None:
    """The path of a file of the folder or hub repository; None where it has no such file."""
    if folder.is_dir():
        return folder / file if (folder / file).exists() else None
    try:
        return Path(hf_hub_download(name, file))
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"{file} of {name!r} cannot be fetched: {_first_line(error)}") from error


def _read_index(path: Path, suffix: str) -> dict[str, set[str]]:
    """{file: tensors that it should have} of an index file; its `metadata` are not used."""
    if not path.is_file() or path.stat().st_size > _MAX_HEADER:
        raise ValueError(f"{path} is no index: more than {_MAX_HEADER} bytes, or no plain file")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f'{path} is no index: it has no "weight_map" of tensor names to files; {_WAY_OUT}') from error
    files: dict[str, set[str]] = {}
    for tensor, file in pairs:
        plain = isinstance(file, str) and file == Path(file).name and file not in ("", "..") and file.isprintable()
        if not plain or "\\" in file or not file.endswith(suffix):
            raise ValueError(
                f"{path} says that {tensor} is in {file!r}, which is not the name of a {suffix} file in its own "
                "folder: such an index is not followed"
            )
        files.setdefault(file, set()).add(tensor)
    if not files:
        raise ValueError(f"{path} names no tensors; {_WAY_OUT}")
    return files


def check_header(path: Path) -> None:
    """ValueError for a .safetensors file whose header is longer than the file, or than any that is of use."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 or header > min(size - 8, _MAX_HEADER):
        raise ValueError(
            f"{path} is truncated or corrupt: a header of {header} bytes in a file of {size}, of at most {_MAX_HEADER} "
            f"that are read; {_WAY_OUT}"
        )


def _safetensors_entries(path: Path) -> dict[str, Entry]:
    check_header(path)
    try:
        # The library compares shapes, dtypes and offsets with one another and with the size of the file.
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            return {
                name: Entry(path, tuple(s.get_shape()), _DTYPES.get(s.get_dtype(), s.get_dtype()))
                for name, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or corrupt ({_first_line(error)}); {_WAY_OUT}") from error


def _bin_entries(path: Path) -> dict[str, Entry]:
    """Of a torch archive, without its data: on the meta device no size is allocated."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is no torch archive, or of a torch before 1.6 ({_first_line(error)}): {_WAY_OUT}, or save it as "
            "safetensors"
        ) from error
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    if not stored or sum(record.file_size for record in records) > size:
        raise ValueError(f"{path} is corrupt: what it says it holds is more than its {size} bytes; {_WAY_OUT}")
    tensors = _load_bin(path, map_location="meta")
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}
    if sum(storages.values()) > size or any(t.numel() * t.itemsize > size for t in tensors.values()):
        raise ValueError(f"{path} is corrupt: its tensors are said to take more than its {size} bytes; {_WAY_OUT}")
    return {
        name: Entry(path, tuple(t.shape), t.dtype if t.dtype in _DTYPES.values() else str(t.dtype))
        for name, t in tensors.items()
    }


def _load_bin(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds other things than tensors, which could run code when read: it is refused; use a checkpoint "
            "in safetensors"
        ) from error
    # A damaged pickle fails in many ways.
    except Exception as error:
        raise ValueError(f"{path} is truncated or corrupt ({_first_line(error)}); {_WAY_OUT}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__} and not tensors by name: {_WAY_OUT}")
    tensors = {name: t for name, t in content.items() if isinstance(name, str) and isinstance(t, torch.Tensor)}
    if any(t.layout != torch.strided for t in tensors.values()):
        raise ValueError(f"{path} holds sparse tensors: only dense ones are taken")
    return tensors


def _reader(path: Path) -> Callable[[str], Any]:
    """What gives a tensor of the file by name, mapped, or something that can be sliced like it."""
    if path.suffix == ".safetensors":
        return safe_open(path, framework="pt").get_slice
    return _load_bin(path, map_location="cpu", mmap=True).__getitem__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
