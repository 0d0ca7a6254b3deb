"""No tracked file names a path of the machine on which it was made, or a package index."""

import re

from tests.architecture.source import ROOT, text_of, tracked_files

MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:Users|home|work|root|private/tmp)/[A-Za-z0-9_.-]+")
INDEX_ADDRESS = re.compile(
    r"(?<!emit)-index-url[ =]|--find-links[ =]|https?://[^\s\"')>]*(?:pypi|/simple\b|artifactory|nexus|devpi)",
    re.IGNORECASE,
)
REQUIREMENT = re.compile(r"^[a-z0-9]", re.IGNORECASE)
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
LOCKS = ("requirements.lock", "requirements-desktop.lock", "requirements-dev.lock")


def _matches(pattern: re.Pattern[str]) -> list[str]:
    lines = []
    for path in tracked_files():
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
            if match := pattern.search(line):
                lines.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    return lines


def test_no_file_names_a_path_of_one_machine() -> None:
    assert _matches(MACHINE_PATH) == []


def test_no_file_names_a_package_index() -> None:
    assert _matches(INDEX_ADDRESS) == []


def test_locks_name_no_host_and_hash_everything() -> None:
    for name in LOCKS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "://" not in text, name
        entries = text.replace("\\\n", " ").splitlines()
        requirements = [entry for entry in entries if REQUIREMENT.match(entry)]
        assert requirements, name
        assert [entry for entry in requirements if "==" not in entry or not HASH.search(entry)] == [], name
