"""The catalogs: every key that is used exists, and every key that exists is used, in every language."""

import ast
import json
import os
import re
import string
from pathlib import Path
from typing import get_args

import pytest

from app.core import errors
from app.core.download import PROBLEMS
from app.core.errors import HubProblem, PacelineError, error_class
from app.core.reason import REASONS
from app.i18n.catalogs import (
    DEFAULT_LANGUAGE,
    NAME_KEY,
    PLACEHOLDER,
    PLURAL_FORMS,
    Catalogs,
    Words,
    languages,
    plural_form,
    read_words,
)
from app.model_settings import ModelSettings
from app.models.drafters.methods import METHOD_NAMES
from app.models.footprint import KV_REFUSALS
from app.serving.errors import HTTP_CODES, Rejected, localized_message
from app.settings import SECTIONS, Settings, TakesEffect
from tests.admin.pseudo import CLOSE, CODE, OPEN, pseudo, write_pseudo_locale
from tests.admin.sources import APP, calls, quoted_keys, scripts, templates

KEY = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+")
USE = re.compile(r"(?<![\w.])\$?(?:t|words)(\.n)?\(\s*[\"'`]([^\"'`]+)[\"'`]")
ENGLISH = read_words().entries
SCRIPTS = {
    "ja": re.compile("[\u3040-\u30ff\u4e00-\u9fff]"),
    "ko": re.compile("[\uac00-\ud7a3]"),
    "zh-Hans": re.compile("[\u4e00-\u9fff]"),
}
NAMES = {
    "DFlash",
    "EAGLE",
    "Hub",
    "LM",
    "MLX",
    "MTP",
    "Min-p",
    "N-gram",
    "Paceline",
    "Qwen",
    "Studio",
    "Top-k",
    "Top-p",
    "bit",
    "mlx",
    "mlx-lm",
}
EFFECTS = get_args(TakesEffect)
UNITS = {"B", "s", "token"}


def stem(key: str) -> str:
    """Return a key without its plural form."""
    base, _, form = key.rpartition(".")
    return base if form in PLURAL_FORMS and f"{base}.other" in ENGLISH else key


def uses() -> list[tuple[str, str, bool]]:
    """Return each use of a catalog key: file, key, and whether a plural form is chosen by a count."""
    paths = [*templates(), *scripts(), *(APP / "admin").glob("*.py")]
    return [(path.name, key, bool(n)) for path in paths for n, key in USE.findall(path.read_text(encoding="utf-8"))]


def test_every_word_that_is_asked_for_exists_in_the_form_that_is_asked_for() -> None:
    assert len(uses()) > 50
    for file, key, counted in uses():
        assert (f"{key}.other" if counted else key) in ENGLISH, f"{file} asks for {key}"


def keys_of_settings() -> set[str]:
    """Return the keys that the two settings forms build from the names of their settings."""
    forms = {"settings": Settings.model_fields, "model_settings": ModelSettings.model_fields}
    keys = {f"{form}.{name}{end}" for form, names in forms.items() for name in names for end in ("", "_about")}
    keys |= {f"settings.section_{name}" for name in SECTIONS} | {f"settings.felt_{when}" for when in EFFECTS}
    return keys | {f"model_settings.kv_{code}" for code in KV_REFUSALS}


def test_every_setting_has_its_words() -> None:
    assert keys_of_settings() - set(ENGLISH) == set()


def test_every_word_is_named_somewhere() -> None:
    """Keys are written out, so a search finds their use; those of settings, refusals, errors and reasons are built."""
    named = quoted_keys() | keys_of_settings() | {f"method.{name}" for name in METHOD_NAMES} | {NAME_KEY}
    unnamed = {key for key in ENGLISH if key not in named and stem(key) not in named}
    assert {key for key in unnamed if not key.startswith(("invalid.", "error.", "reason."))} == set()


def raised_codes() -> set[str]:
    """Return the code of every error that the app creates."""
    codes = set(HTTP_CODES.values())
    for name, call in calls():
        kind = error_class(name)
        if kind is PacelineError and name != "PacelineError":
            continue
        given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        given += call.args[2:3] if kind is Rejected else []
        codes |= {value.value for value in given if isinstance(value, ast.Constant)}
        codes |= {getattr(errors, value.id) for value in given if isinstance(value, ast.Name) and value.id.isupper()}
        codes |= set() if given else {kind.code}
    return codes


def test_every_error_has_words_of_its_own_and_the_words_an_error() -> None:
    worded = {key.removeprefix("error.") for key in ENGLISH if key.startswith("error.")}
    assert worded == raised_codes() | {"other"}


@pytest.mark.parametrize("language", languages())
def test_every_error_is_told_in_every_language(language: str) -> None:
    words = read_words(language)
    messages = [
        localized_message(PacelineError("detail", code=code), words) for code in {*raised_codes(), "never heard of"}
    ]
    messages += [localized_message(HubProblem(problem, "a/b"), words) for problem in PROBLEMS]
    assert [text for text in messages if not SCRIPTS.get(language, re.compile("")).search(text)] == []


def test_every_reason_that_is_given_has_words() -> None:
    """Reasons have English texts for log, terminal and programs, and the same keys in the catalog of each language."""
    makers = [call.args[0] for name, call in calls() if name in {"Reason", "_refused"} and call.args]
    given = {node.value for node in makers if isinstance(node, ast.Constant)}
    assert len(given) > 20
    assert given <= REASONS.keys()
    assert {key.removeprefix("reason.") for key in ENGLISH if key.startswith("reason.")} == REASONS.keys()
    for code, text in REASONS.items():
        fields = {name for _, name, _, _ in string.Formatter().parse(text) if name}
        assert set(PLACEHOLDER.findall(ENGLISH[f"reason.{code}"])) <= fields, code


def test_english_is_the_language_to_compare_with() -> None:
    assert DEFAULT_LANGUAGE in languages()
    assert read_words().name == "English"


@pytest.mark.parametrize("language", languages())
def test_every_language_has_the_same_keys_and_placeholders(language: str) -> None:
    entries = read_words(language).entries
    assert {stem(key) for key in entries} == {stem(key) for key in ENGLISH}
    assert list(entries) == sorted(entries)
    for key, words in entries.items():
        assert KEY.fullmatch(key), key
        assert words.strip() == words != "", key
        english = ENGLISH.get(key) or ENGLISH[f"{stem(key)}.other"]
        assert set(PLACEHOLDER.findall(words)) == set(PLACEHOLDER.findall(english)), key
    for base in {stem(key) for key in ENGLISH} - set(ENGLISH):
        assert f"{base}.other" in entries, base


@pytest.mark.parametrize("language", SCRIPTS)
def test_a_translation_is_in_the_script_of_its_language_or_a_name(language: str) -> None:
    foreign = [
        PLACEHOLDER.sub("", words)
        for words in read_words(language).entries.values()
        if not SCRIPTS[language].search(words)
    ]
    assert {name for words in foreign for name in re.findall(r"[A-Za-z]+(?:-[A-Za-z]+)*", words)} <= NAMES | UNITS


def test_values_fill_placeholders_and_nothing_else() -> None:
    words = Words("en", {"a.b": "{name} of {count}", "a.c": "plain"})
    assert words("a.b", name="{count}", count=3) == "{count} of 3"
    assert words("a.c", name="ignored") == "plain"
    for key, values in (("a.b", {"name": "x"}), ("a.d", {})):
        with pytest.raises(KeyError):
            words(key, **values)


def test_counted_words_take_the_form_of_their_language() -> None:
    entries = {"a.one": "{count} model in {place}", "a.other": "{count} models in {place}"}
    texts = [Words("en", entries).n("a", count, place="memory") for count in (0, 1, 2)]
    assert texts == ["0 models in memory", "1 model in memory", "2 models in memory"]
    assert Words("fr", {"a.other": "{count}"}).n("a", 1) == "1"
    assert [plural_form(language, 1) for language in ("en", "de", "ko", "ja", "zh-Hans")] == [
        "one",
        "one",
        "other",
        "other",
        "other",
    ]


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        ("", "en"),
        ("ko", "ko"),
        ("ko-KR,ko;q=0.9,en;q=0.8", "ko"),
        ("fr-FR, ja;q=0.7, en;q=0.9", "en"),
        ("fr, ja;q=0.7", "ja"),
        ("en; q=0.5, ko; q=0.9", "ko"),
        ("zh-CN", "zh-Hans"),
        ("ZH-hans-cn;q=0.3", "zh-Hans"),
        ("en-GB", "en"),
        ("tlh", "en"),
        ("ko;q=0", "en"),
        ("ko;q=nonsense, ja", "ja"),
        (";;;,,,q=1;*", "en"),
        ("*", "en"),
    ],
)
def test_the_browser_gets_the_first_language_it_wants_that_is_there(
    tmp_path: Path, accepted: str, language: str
) -> None:
    for code in ("ko", "ja", "zh-Hans"):
        (tmp_path / f"{code}.json").write_text(json.dumps({NAME_KEY: code}))
    assert Catalogs(tmp_path).choose(accepted) == language


def test_a_fifth_language_is_one_file_and_what_it_lacks_is_said_in_english(tmp_path: Path) -> None:
    (tmp_path / "fr.json").write_text(json.dumps({NAME_KEY: "Français", "navigation.models": "Modèles"}))
    catalogs = Catalogs(tmp_path)
    assert catalogs.names["fr"] == "Français"
    assert catalogs.words("fr")("navigation.models") == "Modèles"
    assert catalogs.words("fr")("navigation.chat") == "Chat"
    assert catalogs.words("unknown").language == "en"


def test_a_text_with_a_placeholder_that_english_lacks_is_said_in_english(tmp_path: Path) -> None:
    (tmp_path / "fr.json").write_text(json.dumps({"navigation.models": "Modèles {n}", "navigation.chat": "Causer"}))
    words = Catalogs(tmp_path).words("fr")
    assert (words("navigation.models"), words("navigation.chat")) == ("Models", "Causer")


@pytest.mark.parametrize("content", ["{", "[]", "[" * 10**5, '"x"', "\xff", '{"a.b": 1}', "{}"])
def test_a_broken_catalog_is_no_reason_not_to_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "fr.json").write_bytes(content.encode("latin-1"))
    os.mkfifo(tmp_path / "ja.json")
    (tmp_path / "../evil.json").write_text("{}")
    (tmp_path / "NOT A LANGUAGE.json").write_text('{"a.b": "x"}')
    assert set(Catalogs(tmp_path).names) == set(languages())
    assert set(Catalogs(tmp_path / "nowhere").names) == set(languages())


def test_the_pseudo_locale_keeps_placeholders_and_grows(tmp_path: Path) -> None:
    assert pseudo("Load {model}") == "[!! Ļöåð {model}~~ !!]"
    code = write_pseudo_locale(tmp_path)
    words = Catalogs(tmp_path / "languages").words(code)
    assert words.language == CODE not in languages()
    for key, english in ENGLISH.items():
        text = words.entries[key]
        assert PLACEHOLDER.findall(text) == PLACEHOLDER.findall(english)
        assert key == NAME_KEY or (text.startswith(OPEN) and text.endswith(CLOSE) and len(text) > 1.3 * len(english))
