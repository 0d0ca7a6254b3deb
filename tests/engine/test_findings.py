"""A model is probed against mlx-lm's forwards once per machine, not at each load; requests run between forwards."""

from pathlib import Path
from typing import Any

import pytest

from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import probe
from app.engine.caches.rollback import UnknownCacheError
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading import opening
from app.engine.loading.opening import load_and_probe, open_engine
from app.engine.probe import finished
from app.engine.runner import Runner
from app.models.machine_files import MachineFiles
from tests.tiny import write_tiny_model


@pytest.fixture(name="forwards")
def counted_forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the forwards of all runners."""
    forwards: list[str] = []
    forward = Runner.forward

    def counted(self: Runner, *given: Any, **options: Any) -> Any:
        forwards.append("forward")
        return forward(self, *given, **options)

    monkeypatch.setattr(Runner, "forward", counted)
    return forwards


class Home:
    """A folder of models, and the folder of findings that one machine keeps about them."""

    def __init__(self, folder: Path) -> None:
        self.models, self.kept = folder / "models", folder / "kept"

    def model(self, name: str, family: str = "qwen3", **options: Any) -> Path:
        return write_tiny_model(self.models / name, family, **options)

    def load(self, name: str = "m", draft: str = "") -> LoadedUnit:
        drafters = (DrafterSpecification(draft, str(self.models / draft)),) if draft else ()
        spec = ModelSpecification(id=name, path=str(self.models / name), drafters=drafters, max_context_tokens=64)
        return finished(load_and_probe(spec, MachineFiles(self.kept, ("a chip", "mlx 1"))))

    def kept_file(self) -> Path:
        (path,) = self.kept.iterdir()
        return path


@pytest.fixture(name="home")
def empty_home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_the_second_load_knows_what_the_first_one_found(home: Home, forwards: list[str], family: str) -> None:
    home.model("m", family)
    home.model("d", family, noise=0.03)
    first = home.load(draft="d")
    assert set(first.findings) == {"", "draft_model"}
    assert forwards
    forwards.clear()
    again = home.load(draft="d")
    assert again.findings == first.findings
    engine = open_engine(again)
    assert not forwards, "neither the load nor the engine asks again"
    assert engine.runner.recordable is (family == "qwen3_next")
    assert "draft_model" in engine.limits.drafters


def test_a_probe_lets_others_run_after_each_forward(home: Home, forwards: list[str]) -> None:
    home.model("m")
    spec = ModelSpecification(id="m", path=str(home.models / "m"))
    most = 0
    for phase, _ in load_and_probe(spec, MachineFiles(None, ())):
        if phase == "probing":
            most = max(most, len(forwards))
            forwards.clear()
    assert most == 1


def test_another_config_is_probed(home: Home, forwards: list[str]) -> None:
    path = home.model("m")
    home.load()
    config = path / "config.json"
    config.write_text(config.read_text().replace("{", '{"note": "changed",', 1))
    forwards.clear()
    home.load()
    assert forwards


def test_what_is_kept_is_what_counts_and_says_what_it_is_about(home: Home) -> None:
    home.model("m")
    home.load()
    path = home.kept_file()
    assert b"a chip" in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b'"rows_isolated": false', b'"rows_isolated": true'))
    assert open_engine(home.load()).runner.rows_isolated


@pytest.mark.parametrize("content", [b"", b"{}", b'{"key": []}', b"[1"])
def test_a_broken_file_is_replaced(home: Home, forwards: list[str], content: bytes) -> None:
    home.model("m")
    home.load()
    path = home.kept_file()
    whole = path.read_bytes()
    path.write_bytes(content)
    forwards.clear()
    home.load()
    assert forwards
    assert path.read_bytes() == whole


def test_a_model_that_cannot_be_rolled_back_is_not_asked_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.model("m")
    with monkeypatch.context() as patched:
        patched.setitem(probe.SPLIT_DEPENDENT, "mlx_lm.models.qwen3", "its tokens attend to later tokens")
        assert home.load().findings[""].error == "its tokens attend to later tokens"
    limits = open_engine(home.load()).limits
    assert limits.max_rows == 1
    assert "its tokens attend to later tokens" in str(limits.unavailable["ngram"])


def test_a_model_of_an_unknown_cache_is_loaded_and_decodes_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_given: Any, **_options: Any) -> Any:
        raise UnknownCacheError("a cache of the future")

    home.model("m")
    monkeypatch.setattr("app.engine.runner.make_caches", refuse)
    limits = open_engine(home.load()).limits
    assert limits.max_rows == 1
    assert "a cache of the future" in str(limits.unavailable["ngram"])


def test_a_draft_model_that_cannot_be_probed_is_left_out(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.model("m")
    home.model("d", noise=0.03)
    home.load()
    probed = opening.probe

    def fail(tested: Runner) -> Any:
        yield from ()
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(opening, "probe", fail)
    limits = open_engine(home.load(draft="d")).limits
    assert "the probe of d failed: RuntimeError: no such kernel" in str(limits.unavailable["draft_model"])
    assert "ngram" in limits.drafters
    monkeypatch.setattr(opening, "probe", probed)
    assert "draft_model" in open_engine(home.load(draft="d")).limits.drafters, "what failed is not kept"
