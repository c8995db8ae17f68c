"""Files that are whole or not there."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: str | os.PathLike, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it in its place; on an error what was at `path` stays.

    Raises OSError that names the file, on a full disk say.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
