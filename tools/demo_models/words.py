"""Word lists the task generator draws from: fixed lists and common standard-library words."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

from stdlib_text import iterate_docstrings


def split_words(text: str) -> tuple[str, ...]:
    """Split a block of words."""
    return tuple(text.split())


NOUNS = split_words(
    """
    apple banana cherry lemon orange grape melon peach pear plum berry mango bread butter cheese honey sugar coffee
    water juice soup salad pasta pizza cookie cat dog horse mouse tiger lion bear rabbit monkey elephant zebra
    giraffe eagle falcon robin whale dolphin shark turtle spider butterfly river mountain forest ocean lake island
    desert valley garden flower tree leaf grass stone cloud rain snow storm thunder wind sun moon star planet comet
    rocket engine wheel bicycle train boat plane car truck bridge road house window door table chair lamp clock
    mirror pillow blanket bottle cup plate spoon knife fork basket box book paper pencil letter notebook library
    school teacher student doctor nurse farmer baker pilot sailor painter writer singer king queen prince castle
    tower village city country music guitar piano violin drum song dance story poem picture colour red blue green
    yellow purple silver gold copper iron glass cotton wool leather button pocket shirt jacket summer winter spring
    autumn morning evening night monday friday january march april june hello world computer keyboard screen mouse
    printer program python memory model token draft window number letter word sentence question answer idea dream
    friend family mother father sister brother baby child people animal happy quiet bright little gentle quick slow
    strong brave clever silly warm cold fresh sweet pace line
    """
)

NAMES = split_words(
    """
    Ada Alan Grace Linus Maria Tom Anna Ben Clara David Emma Felix Hana Ivan Julia Karl Lena Marco Nina Oscar Paula
    Quinn Rosa Sam Tina Uma Victor Wendy Yuki Zoe Bob Alice Carol Dan Eve Frank Lucy Max Olga Peter Sara Kim Leo Mia
    Noah Omar Priya Ravi Sofia Theo
    """
)

CITIES = split_words(
    """
    Paris London Berlin Rome Madrid Tokyo Oslo Vienna Prague Dublin Lisbon Athens Cairo Delhi Sydney Toronto Chicago
    Boston Denver Seattle Austin Lima Seoul Geneva Zurich Munich Milan Porto Turin Helsinki Stockholm Copenhagen
    Warsaw Budapest Brussels Amsterdam
    """
)

PLURALS = split_words(
    """
    apples books coins stamps marbles pencils cards cookies stickers shells eggs flowers keys toys
    """
)

_CAPITAL_TEXT = """
    France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Japan: Tokyo, Norway: Oslo, Austria: Vienna,
    Ireland: Dublin, Portugal: Lisbon, Greece: Athens, Egypt: Cairo, India: New Delhi, Canada: Ottawa, Peru: Lima,
    Finland: Helsinki, Sweden: Stockholm, Denmark: Copenhagen, Poland: Warsaw, Hungary: Budapest, Belgium: Brussels,
    Switzerland: Bern, England: London, Kenya: Nairobi, China: Beijing, Brazil: Brasilia
"""

CAPITALS = dict(entry.split(": ") for entry in " ".join(_CAPITAL_TEXT.split()).split(", "))


@lru_cache(maxsize=1)
def common_words() -> tuple[str, ...]:
    """Return lower-case words that occur often in the standard library's docstrings, in a stable order."""
    counts: Counter[str] = Counter()
    for text in iterate_docstrings():
        counts.update(re.findall(r"(?<![\w.])[a-z]{3,10}(?![\w(])", text))
    ranked = sorted((-count, word) for word, count in counts.items() if count >= 4)
    return tuple(word for _, word in ranked[:4000])
