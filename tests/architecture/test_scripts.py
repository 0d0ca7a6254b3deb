"""TypeScript's compiler checks the scripts of the pages: names, imports and arguments exist, and none is unused."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.published import JAVASCRIPT

pytestmark = pytest.mark.system("npm")

OPTIONS = {
    "allowJs": True,
    "checkJs": True,
    "noEmit": True,
    "target": "es2022",
    "module": "es2022",
    "moduleResolution": "bundler",
    "lib": ["es2023", "dom", "dom.iterable", "esnext"],
    "types": [],
    "noImplicitThis": False,
    "noImplicitReturns": True,
    "noUnusedLocals": True,
    "noUnusedParameters": True,
    "allowUnreachableCode": False,
}
OF_ANNOTATIONS = {"TS2339", "TS2345", "TS2363", "TS2365", "TS2551"}
"""Codes of complaints that need type annotations: about elements, dates, and `this` in a component."""
COMPLAINT = re.compile(r"^(?P<file>\S+\.js)\((?P<line>\d+),\d+\): error (?P<code>TS\d+): (?P<text>.*)$", re.MULTILINE)


def complaints(folder: Path, scripts: str, config: Path) -> list[str]:
    """Return the compiler's complaints about our scripts in a folder, except those that need annotations."""
    config.write_text(json.dumps({"compilerOptions": OPTIONS, "include": [f"{folder}/{scripts}"]}))
    command = [JAVASCRIPT / "node_modules/.bin/tsc", "--project", config, "--pretty", "false"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    assert not output or COMPLAINT.search(output), output
    return [
        f"{match['file']}:{match['line']}: {match['text']}"
        for match in COMPLAINT.finditer(output)
        if match["code"] not in OF_ANNOTATIONS and not match["file"].startswith("vendor/")
    ]


def test_scripts_use_names_imports_and_arguments_that_exist_and_leave_none_unused(tmp_path: Path) -> None:
    assert complaints(ROOT / "app/static", "*.js", tmp_path / "tsconfig.json") == []


def test_a_script_with_faults_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.js").write_text("export const double = (count) => 2 * count;\n")
    (tmp_path / "faulty.js").write_text(
        'import { double, triple } from "./other.js";\nconst spare = 1;\nexport const six = double(3, 4) + nothing;\n'
    )
    named = complaints(tmp_path, "faulty.js", tmp_path / "tsconfig.json")
    assert [text.split(":")[1] for text in named] == ["1", "1", "2", "3", "3"], named
