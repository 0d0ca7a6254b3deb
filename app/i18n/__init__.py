"""The words of the interface: one flat JSON catalog for each language, shared by templates and scripts.

A key names a place (`downloads.pause`), a value may hold `{name}` placeholders. Counted words have one key for each
plural form (`key.one`, `key.other`). Another language is another JSON file with the keys of `en.json`; a folder of
the user's own may add some, and what is missing in those is said in English. What a method is called (`method.mtp`)
it says itself.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.drafters import METHODS
from app.core.errors import PacelineError
from app.core.safe_files import MAX_JSON_BYTES, read_file

FOLDER = Path(__file__).parent
DEFAULT_LANGUAGE = "en"
NAME_KEY = "language.name"
"""A language's own name for itself."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")
WITHOUT_PLURAL = frozenset({"id", "ja", "ko", "ms", "th", "vi", "zh"})
"""Languages that say one thing and many things alike, as `Intl.PluralRules` has it."""
PLURAL_FORMS = ("zero", "one", "two", "few", "many", "other")

_logger = logging.getLogger("paceline.i18n")


@dataclass(frozen=True, slots=True)
class Words:
    """The catalog of one language; `entries` is what a script gets. In templates it is called `t`."""

    language: str
    entries: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        """The words at `key`, placeholders filled in, as plain text. Raises KeyError for a key or value not given."""
        return PLACEHOLDER.sub(lambda match: str(values[match.group(1)]), self.entries[key])

    def n(self, key: str, count: int, **values: object) -> str:
        """The words for so many: `key.one` or `key.other`, with `{count}`."""
        form = f"{key}.{plural_form(self.language, count)}"
        return self(form if form in self.entries else f"{key}.other", count=count, **values)

    @property
    def name(self) -> str:
        """What the language calls itself."""
        return self.entries[NAME_KEY]


def plural_form(language: str, count: int) -> str:
    """`one` or `other`; scripts ask `Intl.PluralRules`, which knows finer forms, for any language."""
    return "one" if count == 1 and language.partition("-")[0] not in WITHOUT_PLURAL else "other"


class Catalogs:
    """Every language there is: those of the package, and those in folders of the user's own."""

    def __init__(self, *folders: Path) -> None:
        self._words = {language: read_words(language) for language in languages()}
        english = self._words[DEFAULT_LANGUAGE].entries
        for path in (each for folder in folders for each in sorted(folder.glob("*.json"))):
            entries = _read_own(path)
            if entries:
                self._words[path.stem] = Words(path.stem, {**english, NAME_KEY: path.stem, **entries})

    @property
    def names(self) -> Mapping[str, str]:
        """Language -> its own name for itself."""
        return {language: words.name for language, words in sorted(self._words.items())}

    def words(self, language: str) -> Words:
        """The words of a language, or the English ones when there is no such catalog."""
        return self._words.get(language) or self._words[DEFAULT_LANGUAGE]

    def choose(self, accepted: str) -> str:
        """The language for an `Accept-Language` header: the first wanted one that is there, else English."""
        there = {language.lower(): language for language in sorted(self._words)}
        for tag in _by_preference(accepted):
            primary = tag.partition("-")[0]
            kin = (each for each in there if each.startswith(f"{primary}-"))
            for near in (tag, primary, next(kin, "")):
                if near in there:
                    return there[near]
        return DEFAULT_LANGUAGE


def languages(folder: Path = FOLDER) -> tuple[str, ...]:
    """Every language that the package has a catalog of, in alphabetical order."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def read_words(language: str = DEFAULT_LANGUAGE) -> Words:
    """The catalog of a language out of `languages()`."""
    entries = json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))
    methods = {f"method.{each.name}": each.words.get(language, each.words[DEFAULT_LANGUAGE]) for each in METHODS}
    return Words(language, dict(sorted({**methods, **entries}.items())))


def system_languages(environment: Mapping[str, str]) -> str:
    """What the user's own programs speak, as an `Accept-Language` header: `ko_KR.UTF-8` is `ko-KR`."""
    named = next(filter(None, map(environment.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return named.partition(".")[0].partition("@")[0].replace("_", "-")


def _read_own(path: Path) -> dict[str, str]:
    """A catalog that somebody put there: only known shapes, and never a reason not to start."""
    try:
        entries = json.loads(read_file(path, MAX_JSON_BYTES))
    except (PacelineError, ValueError, RecursionError) as error:
        _logger.warning("the catalog %s cannot be read: %s", path.name, error)
        return {}
    if LANGUAGE.fullmatch(path.stem) is None or not isinstance(entries, dict):
        _logger.warning("%s is no catalog: name it like fr.json, with an object of words", path.name)
        return {}
    return {key: words for key, words in entries.items() if isinstance(words, str)}


def _by_preference(accepted: str) -> list[str]:
    """The tags of the header, the most wanted first, in lower case; what is not understood is left out."""
    ranked = []
    for place, part in enumerate(accepted.lower().split(",")):
        tag, _, quality = part.partition(";q=")
        try:
            wish = float(quality) if quality.strip() else 1.0
        except ValueError:
            continue
        if tag.strip() and wish > 0:
            ranked.append((-wish, place, tag.strip()))
    return [tag for _, _, tag in sorted(ranked)]
