"""The disk tier returns what was written or nothing, whatever happened to the process, the file or the disk."""

import gc
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest

from app.engine.loading.pool import open_pool
from app.engine.prefix import disk as prefix_disk
from app.engine.prefix.disk import DAY_SECONDS, Disk, identity_of
from app.engine.prefix.index import ROWS, STATE, CacheBlock, root_key
from app.machine.prefix_files import cached_prompts, clear_cached_prompts, model_folder_name

PATIENCE_SECONDS = 60.0


def arrays_of(block: CacheBlock, size: int = 500) -> dict[str, mx.array]:
    """Return the content of a block, derived from its key, so that every process can check it."""
    key = mx.random.key(int.from_bytes(block.key[:8], "little"))
    return {"0 0": mx.random.normal((1, 2, size, 4), key=key), "0 1": mx.random.normal((1, 2, size, 4), key=key) * 2}


def chain(count: int, owner: str = "me") -> list[CacheBlock]:
    blocks, parent = [], root_key(owner)
    for number in range(count):
        blocks.append(CacheBlock.of(ROWS, parent, [number] * 256))
        parent = blocks[-1].key
    return blocks


def written(disk: Disk, blocks: list[CacheBlock], size: int = 500) -> None:
    for block in blocks:
        arrays = arrays_of(block, size)
        mx.eval(arrays)
        disk.write("model", block, arrays)
    disk.flush(PATIENCE_SECONDS)


def same(actual: dict[str, mx.array] | None, wanted: dict[str, mx.array]) -> bool:
    if actual is None or actual.keys() != wanted.keys():
        return False
    return all(
        actual[name].dtype == array.dtype and bool(mx.array_equal(actual[name], array))
        for name, array in wanted.items()
    )


def test_what_was_written_is_found_by_the_next_process_and_by_nobody_but_the_user(tmp_path: Path) -> None:
    folder, blocks = tmp_path / "prefixes", chain(3)
    state = CacheBlock.of(STATE, blocks[1].key, (5, 6))
    kinds = [kind for kind in vars(mx).values() if isinstance(kind, mx.Dtype) and kind != mx.float64]  # no GPU has it
    arrays = {f"state 0 {n}": mx.arange(24).reshape(2, 3, 4).astype(kind) for n, kind in enumerate(kinds)}
    arrays |= {"nothing": mx.zeros((1, 2, 0, 4)), "one": mx.array(3.5)}
    mx.eval(arrays)
    disk = Disk(folder, 1 << 20)
    disk.write("model", state, arrays)
    written(disk, blocks)
    assert disk.pending == 0
    again = Disk(folder, 1 << 20)
    assert len(again.blocks) == 4
    assert abs(again.blocks.nbytes - disk.blocks.nbytes) < 4096
    assert same(again.read(state), arrays)
    assert all(same(again.read(block), arrays_of(block)) for block in blocks)
    files = list(folder.rglob("*.safetensors"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "model")} == {0o700}
    assert set(mx.load(str(next(path for path in files if "rows" in path.name)))) == {"0 0", "0 1"}, "a standard file"


def test_an_unexpected_failure_of_the_writer_is_logged_and_later_files_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path / "prefixes", 1 << 20)
    disk._enqueue(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    written(disk, chain(1))
    assert [record.getMessage() for record in caplog.records] == [
        "the prefix cache's writer failed; it continues with the next file"
    ]
    assert len(disk.blocks) == 1


def test_a_disk_that_is_no_longer_used_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for number in range(8):
        written(Disk(tmp_path / str(number), 1 << 20), chain(1))
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before


def test_what_is_on_disk_leaves_memory_while_nobody_asks(tmp_path: Path) -> None:
    disk, block = Disk(tmp_path, 1 << 30), chain(1)[0]
    pool, arrays = open_pool(10**9, disk=disk), arrays_of(block)
    mx.eval(arrays)
    disk.write("model", block, arrays)
    disk._writer.submit(int).result(PATIENCE_SECONDS)
    assert disk.pending == 1
    pool.expire()
    assert disk.pending == 0


def test_backups_leave_out_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[Path] = []

    def make(folder: Path) -> None:
        folder.mkdir()
        left_out.append(folder)

    monkeypatch.setattr(prefix_disk, "make_cache_folder", make)
    written(Disk(tmp_path / "prefixes", 1 << 20), chain(1))
    assert left_out == [tmp_path / "prefixes", tmp_path / "prefixes/model"]


@pytest.mark.parametrize("flips", [40, pytest.param(4_000, marks=pytest.mark.soak)])
def test_a_flipped_bit_is_found_and_never_served(tmp_path: Path, flips: int) -> None:
    chance, [block] = random.Random(1), chain(1)
    written(Disk(tmp_path, 1 << 20), [block], size=20)
    [path] = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    places = [*range(0, 400, max(1, 8_000 // flips)), *(chance.randrange(len(content)) for _ in range(flips))]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        disk = Disk(tmp_path, 1 << 20)
        assert disk.read(block) is None, f"byte {place}"
        disk.flush(PATIENCE_SECONDS)
        assert not path.exists()
    for size in (0, 7, 8, 60, 300, len(content) - 1):
        path.write_bytes(content[:size])
        disk = Disk(tmp_path, 1 << 20)
        assert disk.read(block) is None
        disk.flush(PATIENCE_SECONDS)
    path.write_bytes(content)
    assert same(Disk(tmp_path, 1 << 20).read(block), arrays_of(block, 20))


def test_what_is_read_ahead_is_what_is_read_and_damage_is_found_there_too(tmp_path: Path) -> None:
    blocks = chain(3)
    written(Disk(tmp_path, 1 << 20), blocks)
    paths = [tmp_path / "model" / f"rows-{block.key.hex()}.safetensors" for block in blocks]
    disk = Disk(tmp_path, 1 << 20)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].unlink()
    contents = [disk.read_ahead(block) for block in blocks]
    read = [disk.read(block, content) for block, content in zip(blocks, contents, strict=True)]
    assert read[0] is not None
    assert same(read[0], arrays_of(blocks[0]))
    assert read[1:] == [None, None]
    assert [disk.read_ahead(block) is None for block in blocks] == [False, True, True], "these are forgotten"


def test_a_file_in_the_place_of_another_is_not_believed(tmp_path: Path) -> None:
    mine, other = chain(1, "me")[0], chain(1, "you")[0]
    written(Disk(tmp_path, 1 << 20), [mine, other])
    names = {block.key: tmp_path / "model" / f"rows-{block.key.hex()}.safetensors" for block in (mine, other)}
    names[mine.key].write_bytes(names[other.key].read_bytes())
    disk = Disk(tmp_path, 1 << 20)
    assert disk.read(mine) is None
    assert same(disk.read(other), arrays_of(other))


def test_what_was_not_used_for_longest_goes_when_there_is_too_much_or_it_is_too_old(tmp_path: Path) -> None:
    now = [1e9]
    disk = Disk(tmp_path, 150_000, max_days=2, clock=lambda: now[0])
    first, second = chain(3, "first"), chain(3, "second")
    for blocks in (first, second):
        written(disk, blocks)
        disk.used([block.name for block in reversed(blocks)])
        now[0] += DAY_SECONDS
    assert disk.blocks.nbytes <= 150_000
    assert disk.read(first[2]) is None, "the end of what was used before"
    assert all(disk.read(block) for block in (first[0], *second))
    disk.flush(PATIENCE_SECONDS)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) <= 150_000
    now[0] += 0.5 * DAY_SECONDS
    again = Disk(tmp_path, 150_000, max_days=2, clock=lambda: now[0])
    assert {block.name for block in again.blocks} == {block.name for block in second}
    again.clear()
    again.flush(PATIENCE_SECONDS)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_setting_the_computers_clock_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, blocks = Disk(tmp_path, 1 << 20, max_days=2), chain(3)
    written(disk, blocks[:1])
    real = time.time
    for days in (30, -30):
        monkeypatch.setattr(time, "time", lambda days=days: real() + days * DAY_SECONDS)
        written(disk, blocks[:2])
        assert all(disk.read(block) for block in blocks[:2])


@pytest.mark.parametrize("full", ["nearly", "quite"])
def test_a_full_disk_is_told_and_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    now, blocks = [1e9], chain(3)
    disk = Disk(tmp_path, 1 << 20, clock=lambda: now[0])
    written(disk, blocks[:1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patched:
        if full == "nearly":
            patched.setattr(prefix_disk, "FREE_BYTES", 1 << 60)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            written(disk, blocks[1:2])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert disk.write_error
    assert not list(tmp_path.rglob("*.part"))
    written(disk, blocks[2:])
    assert disk.read(blocks[2]) is None, "it rests for a while"
    assert same(disk.read(blocks[0]), arrays_of(blocks[0]))
    now[0] += 120
    written(disk, blocks[1:])
    assert not disk.write_error
    assert all(same(disk.read(block), arrays_of(block)) for block in blocks)


def test_a_writer_short_of_memory_gives_up_one_block_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(parts: object) -> bytes:
        raise MemoryError("no more")

    now, blocks = [1e9], chain(2)
    disk = Disk(tmp_path, 1 << 20, clock=lambda: now[0])
    with monkeypatch.context() as patched:
        patched.setattr(prefix_disk, "_digest", exhausted)
        written(disk, blocks[:1])
    assert disk.write_error == "no more"
    now[0] += 120
    written(disk, blocks)
    assert not disk.write_error
    assert all(same(disk.read(block), arrays_of(block)) for block in blocks)


def test_a_disk_that_fills_up_in_a_file_loses_what_was_under_way_and_nothing_else(tmp_path: Path) -> None:
    now, blocks = [1e9], chain(6)
    disk = Disk(tmp_path, 1 << 20, clock=lambda: now[0])
    written(disk, blocks[:2], size=100)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        written(disk, blocks[2:4])
        written(disk, blocks[4:5], size=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "large" in disk.write_error
    assert disk.pending == 0, "the memory of what was not written is let go of"
    assert disk.blocks.nbytes == sum(path.stat().st_size + 1024 for path in tmp_path.rglob("*") if path.is_file())
    again = Disk(tmp_path, 1 << 20)
    assert [again.read(block) is not None for block in blocks] == [True, True, False, False, False, False]
    now[0] += 120
    written(disk, blocks[2:])
    again = Disk(tmp_path, 1 << 20)
    assert (disk.write_error, len(again.blocks)) == ("", 6)


@pytest.fixture
def others(tmp_path: Path) -> dict[Path, bytes]:
    """Write files that are not ours, below `prefixes` and where links there lead; return their contents by path."""
    theirs = [
        tmp_path / "models/m" / name for name in ("model.safetensors", "x.1.part", f"rows-{'0' * 64}.safetensors")
    ]
    names = ("model.safetensors", "x.1.part", "rows-2.safetensors", f"rows-{'0' * 64}.safetensors.bak", "notes.txt")
    theirs += [tmp_path / "prefixes/x" / name for name in names]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())
    (tmp_path / "prefixes/linked").symlink_to(tmp_path / "models/m")
    (tmp_path / f"prefixes/x/rows-{'1' * 64}.safetensors").symlink_to(theirs[0])
    (tmp_path / f"prefixes/x/rows-{'2' * 64}.1.part").symlink_to(theirs[0])
    return {path: path.read_bytes() for path in theirs}


def test_files_of_others_stay_and_no_link_is_followed(tmp_path: Path, others: dict[Path, bytes]) -> None:
    folder, blocks = tmp_path / "prefixes", chain(2)
    (folder / "model").mkdir()
    for name in (f"rows-{'3' * 64}.1.part", f"rows-{'3' * 64}.safetensors"):
        (folder / "model" / name).write_bytes(b"ours, and damaged")
    disk = Disk(folder, 1 << 20)
    written(disk, blocks)
    assert len(list((folder / "model").iterdir())) == 2, "what is damaged is gone"
    assert len(Disk(folder, 1 << 20).blocks) == 2
    assert [(kept.files, kept.model) for kept in cached_prompts(folder)] == [(2, "")]
    assert clear_cached_prompts(folder) > 2 * 4 * 4000
    assert not (folder / "model").exists()
    disk.clear()
    disk.flush(PATIENCE_SECONDS)
    assert {path: path.read_bytes() for path in others} == others
    assert len(list((folder / "x").iterdir())) == 7


@pytest.mark.parametrize("linked", ["prefixes", "prefixes/model"])
def test_a_linked_folder_is_not_read_nor_written_nor_cleared(
    tmp_path: Path, others: dict[Path, bytes], linked: str
) -> None:
    shown = tmp_path / ("prefixes" if linked == "prefixes" else "prefixes/x")
    shown.rename(tmp_path / "elsewhere")
    (tmp_path / linked).symlink_to(tmp_path / "elsewhere")
    disk = Disk(tmp_path / "prefixes", 1 << 20)
    written(disk, chain(1))
    assert (len(disk.blocks), disk.pending, "is a link" in disk.write_error) == (0, 0, True)
    assert clear_cached_prompts(tmp_path / "prefixes") == 0
    moved = {Path(str(path).replace(str(shown), str(tmp_path / "elsewhere"))): held for path, held in others.items()}
    assert {path: path.read_bytes() for path in moved} == moved


def test_a_pipe_of_our_name_is_not_waited_for(tmp_path: Path) -> None:
    [block] = chain(1)
    path = tmp_path / "model" / f"rows-{block.key.hex()}.safetensors"
    path.parent.mkdir()
    os.mkfifo(path)
    disk = Disk(tmp_path, 1 << 20)
    assert disk.read(block) is None
    written(disk, [block])
    assert same(disk.read(block), arrays_of(block)), "ours takes its place"
    path.unlink()
    os.mkfifo(path)
    assert disk.read(block) is None


def test_a_file_in_the_place_of_the_folder_holds_no_memory_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "prefixes").write_text("thesis")
    disk = Disk(tmp_path / "prefixes", 1 << 20)
    written(disk, chain(2))
    assert (disk.write_error != "", disk.pending) == (True, 0)
    assert (tmp_path / "prefixes").read_text() == "thesis"


CHILD = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from app.engine.prefix.disk import Disk
from tests.engine.test_prefix_disk import arrays_of, chain
disk = Disk(Path(sys.argv[1]), 1 << 30)
told = 0
for number, block in enumerate(chain(10_000)):
    arrays = arrays_of(block, 20_000)
    mx.eval(arrays)
    disk.write("model", block, arrays)
    while len(disk.blocks) < number + 1:
        disk.collect()
    print(number + 1, flush=True)
    if not number:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
"""
"""Program that writes blocks, and kills itself the given number of seconds after the first one."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.soak)])
def test_a_kill_at_any_moment_loses_at_most_the_last_block_and_never_serves_a_wrong_one(
    tmp_path: Path, kills: int
) -> None:
    chance, lost = random.Random(3), []
    for number in range(kills):
        folder = tmp_path / str(number)
        command = [sys.executable, "-c", CHILD, str(folder), str(0.001 + 0.1 * chance.random())]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
        ) as child:
            assert child.stdout is not None
            reported = [*map(int, child.stdout.read().split())][-1]
        assert child.returncode == -signal.SIGKILL
        disk = Disk(folder, 1 << 30)
        contents = [disk.read(block) for block in chain(reported + 2)]
        there = next(place for place, content in enumerate(contents) if content is None)
        assert all(content is None for content in contents[there:]), "a chain, without holes"
        assert all(
            same(content, arrays_of(block, 20_000))
            for content, block in zip(contents[:there], chain(there), strict=True)
        )
        assert reported <= there <= reported + 1
        assert not list(folder.rglob("*.part"))
        lost.append(reported + 1 - there)
    print(f"{kills} kills: {sum(lost)} lost the block under way, none any other")


@pytest.mark.parametrize("model", ["org/sym-main", "café model", "../..", "猫" * 99, "50%", "byte \udce9"])
def test_a_folder_of_kept_prompts_names_its_model_and_changes_with_the_files(tmp_path: Path, model: str) -> None:
    name = model_folder_name(model, "1")
    assert name != model_folder_name(model, "2")
    (tmp_path / "prefixes" / name).mkdir(parents=True)
    (tmp_path / "prefixes" / name / f"rows-{'1' * 64}.safetensors").touch()
    (kept,) = cached_prompts(tmp_path / "prefixes")
    readable = model.replace("\udce9", "?")
    assert kept.model == readable or (len(model) > 50 and readable.startswith(kept.model[:20]))


def test_what_another_version_of_a_library_computed_is_never_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = identity_of(tmp_path)
    monkeypatch.setattr(prefix_disk, "versions", lambda: {"mlx-lm": "0.99"})
    assert identity_of(tmp_path) != now
