"""The texts of the interface: one flat JSON catalog for each language, shared by templates and scripts.

A key names a place (`downloads.pause`); a value may contain `{name}` placeholders. Counted texts have one key for each
plural form (`key.one`, `key.other`). To add a language, add a JSON file with the keys of `en.json`. A user's folder may
add languages too; missing keys get the English text. Names of methods (`method.mtp`) are taken from `METHODS`.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import PacelineError
from app.models.drafters.methods import METHODS
from app.models.safe_files import MAX_JSON_BYTES, read_file

FOLDER = Path(__file__).parent
DEFAULT_LANGUAGE = "en"
NAME_KEY = "language.name"
"""Key of a language's native name."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")
LANGUAGES_WITHOUT_PLURAL = frozenset({"id", "ja", "ko", "ms", "th", "vi", "zh"})
"""Languages without a plural form, according to `Intl.PluralRules`."""
PLURAL_FORMS = ("zero", "one", "two", "few", "many", "other")

logger = logging.getLogger("paceline.i18n")


@dataclass(frozen=True, slots=True)
class Words:
    """The catalog of one language; scripts get its `entries`, templates call it `t`."""

    language: str
    entries: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        """Return the plain text of `key`, placeholders filled in. Raises KeyError for a missing key or value."""
        return PLACEHOLDER.sub(lambda match: str(values[match.group(1)]), self.entries[key])

    def n(self, key: str, count: int, **values: object) -> str:
        """Return the text for a count: `key.one` or `key.other`, with `{count}`."""
        form = f"{key}.{plural_form(self.language, count)}"
        return self(form if form in self.entries else f"{key}.other", count=count, **values)

    @property
    def name(self) -> str:
        """Native name of the language."""
        return self.entries[NAME_KEY]


def plural_form(language: str, count: int) -> str:
    """Return `one` or `other`. Scripts use `Intl.PluralRules` instead, which knows all plural forms of a language."""
    return "one" if count == 1 and language.partition("-")[0] not in LANGUAGES_WITHOUT_PLURAL else "other"


class Catalogs:
    """All languages: those of the package, and those in the user's folders."""

    def __init__(self, *folders: Path) -> None:
        self._words = {language: read_words(language) for language in languages()}
        english = self._words[DEFAULT_LANGUAGE].entries
        for path in (catalog for folder in folders for catalog in sorted(folder.glob("*.json"))):
            entries = _with_known_placeholders(_read_user_catalog(path), english, path.name)
            if entries:
                self._words[path.stem] = Words(path.stem, {**english, NAME_KEY: path.stem, **entries})

    @property
    def names(self) -> Mapping[str, str]:
        """Native names by language."""
        return {language: words.name for language, words in sorted(self._words.items())}

    def words(self, language: str) -> Words:
        """Return the catalog of a language, or the English one when there is none."""
        return self._words.get(language) or self._words[DEFAULT_LANGUAGE]

    def choose(self, accepted: str) -> str:
        """Return the language for an `Accept-Language` header: the most preferred available one, else English."""
        available = {language.lower(): language for language in sorted(self._words)}
        for tag in _by_preference(accepted):
            primary = tag.partition("-")[0]
            regional = (candidate for candidate in available if candidate.startswith(f"{primary}-"))
            for candidate_tag in (tag, primary, next(regional, "")):
                if candidate_tag in available:
                    return available[candidate_tag]
        return DEFAULT_LANGUAGE


def languages(folder: Path = FOLDER) -> tuple[str, ...]:
    """Return all languages of the package's catalogs, in alphabetical order."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def read_words(language: str = DEFAULT_LANGUAGE) -> Words:
    """Read the package's catalog of a language, which must be one of `languages()`."""
    entries = json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))
    methods = {
        f"method.{method.name}": method.words.get(language, method.words[DEFAULT_LANGUAGE]) for method in METHODS
    }
    return Words(language, dict(sorted({**methods, **entries}.items())))


def system_languages(environment: Mapping[str, str]) -> str:
    """Return the language of the user's environment as an `Accept-Language` header: `ko-KR` for `ko_KR.UTF-8`."""
    language = next(filter(None, map(environment.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return language.partition(".")[0].partition("@")[0].replace("_", "-")


def _read_user_catalog(path: Path) -> dict[str, str]:
    """Read a user's catalog: keep only strings, and log errors instead of raising, so that the server still starts."""
    try:
        entries = json.loads(read_file(path, MAX_JSON_BYTES))
    except (PacelineError, ValueError, RecursionError) as error:
        logger.warning("the catalog %s cannot be read: %s", path.name, error)
        return {}
    if LANGUAGE.fullmatch(path.stem) is None or not isinstance(entries, dict):
        logger.warning("%s is no catalog: name it like fr.json, with an object of words", path.name)
        return {}
    return {key: words for key, words in entries.items() if isinstance(words, str)}


def _with_known_placeholders(entries: Mapping[str, str], english: Mapping[str, str], name: str) -> dict[str, str]:
    """Drop the entries with placeholders that the English text lacks, because nothing would fill them; log each."""
    unknown = {
        key: sorted(more)
        for key, words in entries.items()
        if key in english and (more := {*PLACEHOLDER.findall(words)} - {*PLACEHOLDER.findall(english[key])})
    }
    for key, placeholders in unknown.items():
        logger.warning("%s: %s is left out, English has no {%s} there", name, key, "}, {".join(placeholders))
    return {key: words for key, words in entries.items() if key not in unknown}


def _by_preference(accepted: str) -> list[str]:
    """Return the tags of an `Accept-Language` header in lower case, most preferred first, without invalid parts."""
    preferences = []
    for index, entry in enumerate(accepted.lower().split(",")):
        tag, _, parameter = entry.partition(";")
        quality = parameter.strip().removeprefix("q=").strip()
        try:
            weight = float(quality) if quality else 1.0
        except ValueError:
            continue
        if tag.strip() and weight > 0:
            preferences.append((-weight, index, tag.strip()))
    return [tag for _, _, tag in sorted(preferences)]
