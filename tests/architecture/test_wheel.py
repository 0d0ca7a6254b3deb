"""The wheel that users install is complete: code, embedded models, catalogs, templates, licence."""

import subprocess
import sys
import zipfile
from pathlib import Path

from app import __version__
from tests.architecture.source import PACKAGE, ROOT, tracked_files

MODELS = ("demo-assistant", "demo-draft", "demo-hybrid")
PAGE_FILES = (
    "app/admin/templates/base.html",
    "app/admin/templates/base.html",
    "app/i18n/en.json",
    "app/static/paceline.css",
    "app/static/core.js",
    "app/static/vendor/LICENSES.txt",
    "app/static/vendor/alpine.js",
)
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    wheel = tmp_path / f"paceline-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    wanted = {path.relative_to(ROOT).as_posix() for path in tracked_files() if path.is_relative_to(PACKAGE)}
    wanted |= {f"app/demo_models/{model}/{name}" for model in MODELS for name in MODEL_FILES}
    wanted |= set(PAGE_FILES)
    assert wanted - packed == set()
    assert {f"app/store/migrations/versions/{name}.py" for name in ("0001_choices", "0002_dashboard")} <= packed
    assert f"paceline-{__version__}.dist-info/licenses/LICENSE" in packed
    assert f"paceline-{__version__}.dist-info/entry_points.txt" in packed
