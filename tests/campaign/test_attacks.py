"""Parts of attacks: the requests that they send, and their judgement of files on disk and of answers."""

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from app.store.store import FILE_NAME, Store
from campaign.attacks.bodies import hostile_body, operations
from campaign.attacks.constraints import CONSTRAINTS, constraints_after, fits, random_regex, random_schema
from campaign.attacks.crashes import torn_files
from campaign.attacks.hubs import LIES, LyingRepository
from campaign.attacks.stores import damage_bytes, damage_pages, damage_protection, damage_value, fill_store
from campaign.attacks.wire import EXPENSIVE
from tests.hub.queue import model_files
from tests.models.folders import packed


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home that a killed server leaves: a store, a JSON file, a tensor file."""
    Store(tmp_path / FILE_NAME).close()
    fill_store(tmp_path / FILE_NAME)
    (tmp_path / "tokenizers.json").write_text('{"a": 1}')
    (tmp_path / "kept.safetensors").write_bytes(model_files(3)["model.safetensors"])
    return tmp_path


def test_a_whole_home_has_no_torn_file_and_looking_changes_nothing(home: Path) -> None:
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    assert torn_files(home) == []
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


@pytest.mark.parametrize("name", ["tokenizers.json", "kept.safetensors", FILE_NAME])
def test_a_file_that_was_half_written_is_torn(home: Path, name: str) -> None:
    path = home / name
    path.write_bytes(path.read_bytes()[:-7] if name != FILE_NAME else path.read_bytes()[:4096])
    assert len(torn_files(home)) == 1


@pytest.mark.parametrize("content", [b"", b"1234567", packed(b"no json"), packed(b'{"a": {}}')])
def test_what_is_no_file_of_tensors_is_torn(home: Path, content: bytes) -> None:
    (home / "kept.safetensors").write_bytes(content)
    assert torn_files(home) == ["kept.safetensors is torn"]


def test_a_store_that_was_set_aside_is_a_loss(home: Path) -> None:
    (home / f"{FILE_NAME}.damaged-1").write_bytes(b"x")
    assert torn_files(home) == [f"{FILE_NAME}.damaged-1 was set aside"]


def test_a_text_keeps_to_a_schema_or_does_not() -> None:
    assert fits({"const": {"a": 1}}, '{"a": 1}')
    assert not fits({"const": {"a": 1}}, '{"a": 2}')
    assert not fits({"type": "string"}, "no json")
    assert not fits({"$ref": "#"}, '"anything"'), "nothing keeps to what refers to itself alone"


@pytest.mark.parametrize("make", dict.fromkeys(CONSTRAINTS), ids=lambda make: make.__name__)
def test_every_constraint_can_be_sent_and_no_empty_text_keeps_to_one_that_wants_more(make: Any) -> None:
    constraint = make(random.Random(1))
    assert len(json.dumps(constraint.fields)) < 1 << 20
    if make not in {random_regex, random_schema}:
        assert not constraint.is_met_by("")


def test_every_kind_of_constraint_comes_once_before_any_comes_by_chance() -> None:
    rng = random.Random(1)
    assert constraints_after(0, rng)[: len(CONSTRAINTS)] == list(CONSTRAINTS)
    assert constraints_after(3, rng)[: len(CONSTRAINTS) - 3] == list(CONSTRAINTS[3:])
    later = constraints_after(len(CONSTRAINTS), rng)
    assert later != list(CONSTRAINTS)
    assert set(later) == set(CONSTRAINTS)


def test_every_choice_keeps_to_its_constraint() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        made = next(constraint for constraint in CONSTRAINTS if constraint.__name__ == "many_choices")(rng)
        assert made.is_met_by(made.fields["structured_outputs"]["choice"][seed])


def test_random_schemas_are_schemas() -> None:
    import jsonschema

    for seed in range(200):
        form = random_schema(random.Random(seed)).fields["response_format"]
        jsonschema.Draft202012Validator.check_schema(form["json_schema"]["schema"])


def test_routes_that_change_something_are_found_with_the_fields_of_their_bodies() -> None:
    shape = {"properties": {"model": {}, "n": {}}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    document = {
        "paths": {
            "/v1/x": {"post": {"requestBody": {"content": content}}, "get": {}},
            "/y/{id}": {"delete": {}},
            "/admin/api/worker/restart": {"post": {}},
        },
        "components": {"schemas": {"Body": shape}},
    }
    assert operations(document) == [("POST", "/v1/x", ["model", "n"]), ("DELETE", "/y/{id}", [])]


def test_hostile_bodies_are_of_many_kinds() -> None:
    rng = random.Random(3)
    assert len({hostile_body(rng, ["model", "n", "stop"])[:200] for _ in range(300)}) > 100


@pytest.mark.parametrize("name", LIES)
def test_every_lie_differs_from_the_truth(name: str) -> None:
    files = model_files(10)
    truth, lie = LyingRepository("a/b", files), LyingRepository("a/b", files, lie=LIES[name])
    assert json.dumps(lie.information(blobs=True)) != json.dumps(truth.information(blobs=True))


@pytest.mark.parametrize("damage", [damage_bytes, damage_pages, damage_value, damage_protection])
def test_every_damage_changes_the_store(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / FILE_NAME
    fill_store(path)
    before, changed = path.read_bytes(), 0
    for seed in range(10):
        path.write_bytes(before)
        assert damage(path, random.Random(seed))
        changed += path.read_bytes() != before
    assert changed >= 8, "a value may happen to be what was there"


def test_a_damaged_protection_stays_a_row_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    fill_store(path)
    damage_protection(path, random.Random(2))
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM setting WHERE name = 'require_key'").fetchone() == (1,)


@pytest.mark.parametrize("make", EXPENSIVE)
def test_an_expensive_request_ends(make: Any) -> None:
    assert 1000 < sum(map(len, make("key"))) < 20 << 20
