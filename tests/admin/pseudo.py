"""A pseudo-locale: English with accents, in brackets and 40 % longer, which reveals text that is not translated or
does not fit. Tests write it as a user's catalog; the app never offers it otherwise.
"""

import json
from pathlib import Path

from app.i18n.catalogs import NAME_KEY, PLACEHOLDER, read_words
from app.serving.live_settings import USER_LANGUAGES

CODE = "en-XA"
OPEN, CLOSE = "[!! ", " !!]"
ACCENTED = str.maketrans(
    "ACDEGHIJKLNORSTUWYZacdeghijklnorstuwyz",
    "ÅÇÐÉĜĤÎĴĶĻÑÖŔŠŢÛŴÝŽåçðéĝĥîĵķļñöŕšţûŵýž",
)
GROWTH = 0.4
FILLER = "~~~~ "


def pseudo(words: str) -> str:
    """Return the pseudo-translation: `Load {model}` → `[!! Ļöåð {model}~~ !!]`; placeholders are kept."""
    names = [f"{{{name}}}" for name in PLACEHOLDER.findall(words)]
    parts = PLACEHOLDER.split(words)[::2]
    accented = [part.translate(ACCENTED) for part in parts]
    text = accented[0] + "".join(name + part for name, part in zip(names, accented[1:], strict=True))
    length = round(GROWTH * sum(map(len, parts)))
    return f"{OPEN}{text}{(FILLER * length)[:length].rstrip()}{CLOSE}"


def write_pseudo_locale(home: Path) -> str:
    """Write the catalog where an application with this `PACELINE_HOME` finds it; return its language code."""
    folder = home / USER_LANGUAGES
    folder.mkdir(parents=True, exist_ok=True)
    entries = {key: pseudo(words) for key, words in read_words().entries.items()} | {NAME_KEY: "Pseudo"}
    (folder / f"{CODE}.json").write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")
    return CODE
