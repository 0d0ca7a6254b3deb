"""The words of the interface: one flat JSON catalog for each language, shared by templates and scripts.

A key names a place (`reply.send`), a value may hold `{name}` placeholders. Another language is another JSON file with
the keys of `en.json`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
DEFAULT_LANGUAGE = "en"
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Words:
    """The catalog of one language; `entries` is what a script gets."""

    language: str
    entries: Mapping[str, str]

    def t(self, key: str, **values: object) -> str:
        """The words at `key`, placeholders filled in, as plain text. Raises KeyError for a key or value not given."""
        return PLACEHOLDER.sub(lambda match: str(values[match.group(1)]), self.entries[key])


def languages() -> tuple[str, ...]:
    """Every language that has a catalog, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def read_words(language: str = DEFAULT_LANGUAGE) -> Words:
    """The catalog of a language out of `languages()`."""
    return Words(language, json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8")))
