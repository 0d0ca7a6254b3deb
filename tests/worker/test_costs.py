"""Costs that outlive a load: which are stored, which are trusted, and that broken files do no harm."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from app.core.messages import LoadModel, UnloadModel
from app.core.step import StepCost
from app.core.unit import DrafterSpecification, LiveValues, ModelSpecification
from app.models.machine_files import CostFiles
from tests.worker.fakes import WARM_COSTS
from tests.worker.pair import Pair

MACHINE = ("A chip (gpu)", "mlx 0.32.0")
COSTS = (StepCost("off", 1, 0, 0.02), StepCost("dflash", 1, 7, 0.03, 0.006))
SPEC = ModelSpecification(id="m", path="/models/m", drafters=(DrafterSpecification("d", "/models/d", "dflash"),))


@pytest.fixture(name="files")
def kept_files(tmp_path: Path) -> CostFiles:
    return CostFiles(tmp_path / "home" / "costs", MACHINE)


def only_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "home" / "costs").iterdir()
    return path


def test_what_was_kept_is_recalled_by_the_next_process(files: CostFiles, tmp_path: Path) -> None:
    assert files.load(SPEC) == ()
    files.save(SPEC, COSTS)
    assert CostFiles(tmp_path / "home" / "costs", MACHINE).load(SPEC) == COSTS
    assert stat.S_IMODE(only_file(tmp_path).stat().st_mode) == 0o600
    assert b"A chip (gpu)" in only_file(tmp_path).read_bytes(), "a person can read what it is about"


@pytest.mark.parametrize(
    ("machine", "spec"),
    [
        (("Another chip", "mlx 0.32.0"), SPEC),
        (("A chip (gpu)", "mlx 0.33.0"), SPEC),
        (MACHINE, msgspec.structs.replace(SPEC, id="n")),
        (MACHINE, msgspec.structs.replace(SPEC, drafters=())),
    ],
)
def test_costs_of_another_machine_library_model_or_drafter_are_others(
    files: CostFiles, tmp_path: Path, machine: tuple[str, ...], spec: ModelSpecification
) -> None:
    files.save(SPEC, COSTS)
    assert CostFiles(tmp_path / "home" / "costs", machine).load(spec) == ()


def test_settings_of_the_scheduler_do_not_change_what_steps_cost(files: CostFiles) -> None:
    files.save(SPEC, COSTS)
    assert files.load(msgspec.structs.replace(SPEC, live=LiveValues(policy="single", queue_limit=1))) == COSTS


def test_what_an_older_version_measured_is_measured_anew(files: CostFiles, tmp_path: Path) -> None:
    files.save(SPEC, COSTS)
    path = only_file(tmp_path)
    kept = msgspec.json.decode(path.read_bytes())
    assert kept.pop("version") == 2
    path.write_bytes(msgspec.json.encode(kept))
    again = CostFiles(path.parent, MACHINE)
    assert again.load(SPEC) == ()
    again.save(SPEC, COSTS)
    assert again.load(SPEC) == COSTS


def test_contexts_and_what_requests_taught_are_kept(files: CostFiles, tmp_path: Path) -> None:
    costs = (*COSTS, StepCost("off", 1, 0, 0.05, context_tokens=8_192, is_learnt=True))
    files.save(SPEC, costs)
    assert CostFiles(tmp_path / "home" / "costs", MACHINE).load(SPEC) == costs


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"key": [], "costs": []}',
        b'{"key": 7, "costs": "many"}',
        b"\xff" * 100,
        b" " * (2 << 20),
    ],
)
def test_a_broken_file_is_ignored_and_replaced(files: CostFiles, tmp_path: Path, content: bytes) -> None:
    files.save(SPEC, COSTS)
    path = only_file(tmp_path)
    path.write_bytes(content)
    again = CostFiles(path.parent, MACHINE)
    assert again.load(SPEC) == ()
    again.save(SPEC, COSTS)
    assert again.load(SPEC) == COSTS


@pytest.mark.parametrize("change", [(b"0.02", b"-1"), (b"0.02", b"1e999"), (b'"rows": 1', b'"rows": 0')])
def test_impossible_numbers_are_not_believed(files: CostFiles, tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    files.save(SPEC, COSTS)
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(*change, 1))
    assert files.load(SPEC) == ()


def test_costs_that_could_not_be_written_are_written_the_next_time(files: CostFiles, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a folder")
    files.save(SPEC, COSTS)
    (tmp_path / "home").unlink()
    files.save(SPEC, COSTS)
    assert CostFiles(tmp_path / "home" / "costs", MACHINE).load(SPEC) == COSTS


def test_a_folder_in_the_place_of_the_file_is_no_reason_to_fail(files: CostFiles, tmp_path: Path) -> None:
    files.save(SPEC, COSTS)
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    again = CostFiles(path.parent, MACHINE)
    assert again.load(SPEC) == ()
    again.save(SPEC, COSTS)
    assert list(path.parent.iterdir()) == [path], "the temporary file is gone"


def test_the_same_costs_are_written_once(files: CostFiles, tmp_path: Path) -> None:
    files.save(SPEC, COSTS)
    path = only_file(tmp_path)
    os.utime(path, (0, 0))
    files.save(SPEC, COSTS)
    files.save(SPEC, ())
    assert path.stat().st_mtime == 0
    files.save(SPEC, COSTS[:1])
    assert path.stat().st_mtime > 0


def test_without_a_folder_nothing_is_kept() -> None:
    files = CostFiles(None, MACHINE)
    files.save(SPEC, COSTS)
    assert files.load(SPEC) == ()


def test_the_loop_hands_over_what_was_learnt_while_nobody_waits(tmp_path: Path) -> None:
    kept: list[str] = []
    pair = Pair(tmp_path, save_costs=lambda spec, _costs: kept.append(spec.id))
    pair.say(pair.ask(max_tokens=150))
    pair.settle(8)
    assert kept == []
    pair.settle()
    assert pair.finished()
    pair.now += 60
    pair.turn()
    assert kept == ["m"]
    pair.say(UnloadModel(id="u", model_id="m"))
    pair.settle()
    assert kept == ["m", "m"]


def test_what_a_warm_up_measured_is_known_to_the_requests_that_follow(tmp_path: Path) -> None:
    kept: list[StepCost] = []
    pair = Pair(tmp_path, save_costs=lambda _spec, costs: kept.extend(costs))
    pair.say(pair.ask())
    pair.settle()
    pair.pool.cold.append("m")
    pair.settle()
    pair.now += 60
    pair.turn()
    assert set(WARM_COSTS) <= set(kept)
    assert not pair.pool.cold
    assert pair.pool.known_costs
    assert set(pair.pool.known_costs) <= set(kept), "it begins with what requests have taught"


def test_no_model_is_warmed_up_while_a_request_runs(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.say(pair.ask(max_tokens=150))
    pair.settle(8)
    pair.pool.cold.append("m")
    pair.settle(8)
    assert pair.pool.cold
    pair.settle()
    assert pair.finished()
    assert not pair.pool.cold


@pytest.mark.parametrize("by", ["a load", "a request"])
def test_what_was_learnt_of_a_unit_is_kept_when_another_one_replaces_it(tmp_path: Path, by: str) -> None:
    kept: list[str] = []
    pair = Pair(tmp_path, save_costs=lambda spec, _costs: kept.append(spec.id))
    pair.say(pair.ask())
    pair.settle(30)
    assert pair.finished()
    kept.clear()
    pair.pool.evict("m")
    pair.say(LoadModel(id="l", model=pair.model()) if by == "a load" else pair.ask("l"))
    pair.settle()
    assert {event.id for event in pair.of("l")} == {"l"}
    assert kept[0] == "m"
