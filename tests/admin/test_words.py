"""The catalogs: every word that is used exists, every word that exists is used, in every language."""

import re

import pytest

from app.admin.assets import FOLDER as STATIC
from app.admin.pages import TEMPLATES
from app.i18n import DEFAULT_LANGUAGE, PLACEHOLDER, Words, languages, read_words

KEY = re.compile(r"[a-z]+(?:\.[a-z]+)+")
USE = re.compile(r"\bt\(\s*([^,)]+)")


def used() -> set[str]:
    sources = [*TEMPLATES.glob("*.html"), *STATIC.glob("*.js")]
    calls = {argument.strip() for path in sources for argument in USE.findall(path.read_text(encoding="utf-8"))}
    return {argument.strip("\"'") for argument in calls}


def test_every_key_is_written_out() -> None:
    assert [argument for argument in used() if not KEY.fullmatch(argument)] == []


def test_used_and_existing_keys_are_the_same() -> None:
    assert used() == set(read_words().entries)


def test_english_is_the_language_to_compare_with() -> None:
    assert DEFAULT_LANGUAGE in languages()


@pytest.mark.parametrize("language", languages())
def test_every_language_has_the_same_keys_and_placeholders(language: str) -> None:
    entries, english = read_words(language).entries, read_words().entries
    assert list(entries) == list(english)
    for key, words in entries.items():
        assert KEY.fullmatch(key)
        assert words.strip() == words != ""
        assert set(PLACEHOLDER.findall(words)) == set(PLACEHOLDER.findall(english[key])), key


def test_values_fill_placeholders_and_nothing_else() -> None:
    words = Words("en", {"a.b": "{name} of {count}", "a.c": "plain"})
    assert words.t("a.b", name="{count}", count=3) == "{count} of 3"
    assert words.t("a.c", name="ignored") == "plain"
    for key, values in (("a.b", {"name": "x"}), ("a.d", {})):
        with pytest.raises(KeyError):
            words.t(key, **values)
