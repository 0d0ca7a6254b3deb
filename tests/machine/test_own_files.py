"""Only files with our own names are found and opened: no link is followed, and nothing waits for a pipe."""

import os
import plistlib
from pathlib import Path

import pytest

from app.machine.own_files import (
    ANY,
    MAX_FILE_BYTES,
    make_cache_folder,
    make_folder,
    open_regular_file,
    own_files,
    own_folders,
    read_regular_file,
)

NAME = r"ours-[0-9]\.txt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make two folders, each with one file of ours among lookalikes: other names, a link, a folder, a pipe."""
    root = tmp_path / "root"
    for folder in ("a", "b"):
        (root / folder).mkdir(parents=True)
        (root / folder / "ours-1.txt").write_text("ours")
        (root / folder / "theirs.txt").write_text("theirs")
        (root / folder / "ours-1.txt.bak").write_text("theirs")
        (root / folder / "ours-2.txt").symlink_to("theirs.txt")
        (root / folder / "ours-3.txt").mkdir()
        os.mkfifo(root / folder / "ours-4.txt")
    (root / "linked").symlink_to(root / "a")
    (root / "ours-5.txt").write_text("at another level")
    return root


def test_files_are_found_by_their_whole_names_and_through_no_link(root: Path) -> None:
    assert list(own_files(root, ANY, NAME)) == [root / "a/ours-1.txt", root / "b/ours-1.txt"]
    assert list(own_files(root, NAME)) == [root / "ours-5.txt"]
    assert list(own_files(root, "a|linked", NAME)) == [root / "a/ours-1.txt"]
    assert list(own_folders(root, ANY)) == [root / "a", root / "b"]
    assert list(own_folders(root, "linked|a", NAME)) == [root / "a/ours-3.txt"]


def test_the_folder_that_is_named_may_be_a_link_and_may_not_be_there(root: Path) -> None:
    assert list(own_files(root / "linked", NAME)) == [root / "linked/ours-1.txt"]
    assert list(own_files(root / "nowhere", NAME)) == []
    assert list(own_files(root / "ours-5.txt", NAME)) == []


@pytest.mark.parametrize("name", ["ours-2.txt", "ours-3.txt", "ours-4.txt", "/dev/null", "nowhere"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_what_is_no_regular_file_is_refused_without_waiting(root: Path, name: str, flags: int) -> None:
    with pytest.raises(OSError, match=name):
        open_regular_file(root / "a" / name, flags)


def test_a_new_file_is_its_owners_alone_and_no_more_than_a_small_file_is_read(root: Path) -> None:
    path = root / "new"
    with os.fdopen(open_regular_file(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(b"12345678")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_regular_file(path) == b"12345678"
    os.truncate(path, 1 << 40)
    assert len(read_regular_file(path)) == MAX_FILE_BYTES


def test_a_folder_is_made_and_a_link_is_never_taken_for_one(root: Path) -> None:
    for _ in range(2):
        make_folder(root / "c/d")
    assert (root / "c/d").stat().st_mode & 0o777 == 0o700
    for name in ("linked", "ours-5.txt"):
        with pytest.raises(OSError, match=name):
            make_folder(root / name)


class Attributes:
    """Stands in for macOS's C library and records `setxattr` calls; a `result` of -1 is a file system that refuses."""

    def __init__(self, result: int = 0) -> None:
        self.result, self.set = result, []

    def setxattr(self, path: bytes, name: bytes, value: bytes, size: int, position: int, options: int) -> int:
        self.set.append((path, name, plistlib.loads(value), len(value) - size, position, options))
        return self.result


@pytest.mark.parametrize("result", [0, -1], ids=["kept", "refused"])
def test_a_cache_folder_is_kept_out_of_time_machine_on_a_mac_alone(root: Path, result: int) -> None:
    library = Attributes(result)
    make_cache_folder(root / "cache", system="linux", library=library)
    assert library.set == []
    make_cache_folder(root / "cache", system="darwin", library=library)
    name = b"com.apple.metadata:com_apple_backup_excludeItem"
    assert library.set == [(bytes(root / "cache"), name, "com.apple.backupd", 0, 0, 0)]
    with pytest.raises(OSError, match="linked"):
        make_cache_folder(root / "linked", system="darwin", library=library)
    assert len(library.set) == 1, "what a link leads to is not ours"
