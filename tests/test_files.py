import errno

import pytest

from dejavu_ds.files import write_whole


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    write_whole(path, lambda p: p.write_text("new"))
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def write(partial):
        partial.write_text("ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"a\.json cannot be written: No space left on device"):
        write_whole(path, write)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
