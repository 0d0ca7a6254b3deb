"""Spelling, repeating, word lists, JSON and small Python functions."""

from __future__ import annotations

import json
import random
import string

from functions import FUNCTIONS
from samples import Turn, join_items, pick, polish
from words import CITIES, NAMES, NOUNS, common_words, split_words


def any_word(rng: random.Random) -> str:
    """Return a noun, a common word or, rarely, a name or a made-up word."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(NOUNS)
    if kind < 0.88:
        return rng.choice(common_words())
    if kind < 0.94:
        return rng.choice(NAMES)
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 8)))


def spelling(rng: random.Random) -> Turn:
    """Spell a word letter by letter, or count its letters."""
    word = any_word(rng)
    quoted = pick(rng, word, word, word, f'"{word}"', f"'{word}'")
    letters = "-".join(word)
    if rng.random() < 0.2:
        text = pick(rng, "how many letters are in {w}", "how many letters does {w} have", "count the letters in {w}")
        request = polish(rng, text.format(w=quoted), imperative=text[0] == "c")
        return Turn(request, f"{letters}: {len(word)} letters")
    text = pick(
        rng,
        "spell {w}",
        "spell {w}",
        "spell the word {w}",
        "how do you spell {w}",
        "spell out {w}",
        "how is {w} spelled",
        "what are the letters of {w}",
    )
    return Turn(polish(rng, text.format(w=quoted), imperative=text[0] == "s"), letters)


def _phrase(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(1, 6)))
    words = [any_word(rng) for _ in range(rng.randint(1, 9))]
    if kind < 0.35:
        words[rng.randrange(len(words))] = str(rng.randint(0, 2000))
    text = " ".join(words)
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:] + rng.choice(".!?")
    return text


def repeating(rng: random.Random) -> Turn:
    """Say something back, once or several times."""
    text = _phrase(rng)
    if rng.random() < 0.2:
        times = rng.randint(2, 6)
        text = " ".join(text.split()[:2])
        request = pick(rng, f"repeat {text} {times} times", f"say {text} {times} times", f"write {text} {times} times")
        return Turn(polish(rng, request), "\n".join([text] * times))
    lead = pick(
        rng,
        "repeat after me: ",
        "repeat after me: ",
        "repeat: ",
        "say: ",
        "say ",
        "echo ",
        "repeat this: ",
        "repeat the following: ",
        "copy this text: ",
        "repeat after me ",
        "write: ",
        "echo: ",
    )
    if rng.random() < 0.5:
        lead = lead[0].upper() + lead[1:]
    return Turn(lead + (f'"{text}"' if rng.random() < 0.1 else text), text)


def word_sorting(rng: random.Random) -> Turn:
    """Sort words by their first letters, reverse a list, or name its first or last item."""
    words, firsts = [], set()
    wanted = rng.randint(3, 6)
    while len(words) < wanted:
        word = rng.choice(NOUNS)
        if word[0] not in firsts:
            firsts.add(word[0])
            words.append(word)
    listed, kind = join_items(rng, words), rng.random()
    if kind < 0.5:
        text = pick(
            rng, "sort these words: {l}", "sort {l}", "sort {l} alphabetically", "put {l} in alphabetical order"
        )
        return Turn(polish(rng, text.format(l=listed)), ", ".join(sorted(words)))
    if kind < 0.75:
        text = pick(rng, "reverse this list: {l}", "reverse the list {l}", "write {l} in reverse order")
        return Turn(polish(rng, text.format(l=listed)), ", ".join(reversed(words)))
    first = rng.random() < 0.5
    which = "first" if first else "last"
    text = pick(rng, f"what is the {which} word of {listed}", f"which word comes {which}: {listed}")
    return Turn(polish(rng, text, imperative=False), words[0] if first else words[-1])


def _field_value(rng: random.Random, field: str) -> str | int | bool:
    if field in ("name", "author", "owner", "friend"):
        return rng.choice(NAMES)
    if field in ("city", "place", "home"):
        return rng.choice(CITIES)
    if field in ("age", "price", "count", "year", "score", "id", "size", "pages", "weight", "number"):
        return rng.randint(1, 99) if field != "year" else rng.randint(1900, 2030)
    if field in ("active", "done", "open"):
        return rng.random() < 0.5
    return rng.choice(NOUNS)


FIELDS = split_words(
    """
    name age city colour title author price count year animal job score id size pages food owner place active done
    type weight key value status label friend home number item
    """
)


def json_object(rng: random.Random) -> Turn:
    """Turn named values into one line of JSON."""
    names = rng.sample(FIELDS, rng.randint(1, 4))
    if rng.random() < 0.4:
        names = ["name", "age", "city", "job"][: rng.randint(1, 4)]
    if rng.random() < 0.08:
        names[-1] = any_word(rng)
    values = {name: _field_value(rng, name) for name in names}
    mark = pick(rng, " ", " ", " ", " = ", ": ", " is ")
    shown = [f"{k}{mark}{json.dumps(v) if isinstance(v, bool) else v}" for k, v in values.items()]
    listed = ", ".join(shown) if rng.random() < 0.8 or mark != " " else " and ".join(shown)
    text = pick(
        rng,
        "make JSON from {l}",
        "make json from {l}",
        "JSON from {l}",
        "write JSON for {l}",
        "turn this into JSON: {l}",
        "convert to JSON: {l}",
        "make a JSON object with {l}",
        "as JSON: {l}",
        "give me JSON with {l}",
        "create JSON from {l}",
    )
    if rng.random() < 0.12:
        return Turn(polish(rng, text.format(l=listed) + ", indented"), json.dumps(values, indent=2))
    return Turn(polish(rng, text.format(l=listed)), json.dumps(values))


def json_list(rng: random.Random) -> Turn:
    """Turn a list of words or numbers into a JSON array."""
    numbers = rng.random() < 0.4
    items: list[str | int] = [rng.randint(0, 99) if numbers else rng.choice(NOUNS) for _ in range(rng.randint(2, 7))]
    listed = join_items(rng, [str(item) for item in items])
    text = pick(
        rng,
        "make a JSON list of {l}",
        "JSON array of {l}",
        "turn {l} into a JSON list",
        "make a JSON array from {l}",
        "write {l} as a JSON list",
        "json list: {l}",
    )
    return Turn(polish(rng, text.format(l=listed)), json.dumps(items))


def python_function(rng: random.Random) -> Turn:
    """Write one of a fixed set of small functions, with a chosen name, variable or constant."""
    spec = rng.choice(FUNCTIONS)
    number = rng.randint(2, 20)
    name = spec.name.format(n=number)
    wish = rng.choice(spec.wishes).format(n=number)
    text = pick(
        rng,
        "write a python function that {w}",
        "write a Python function that {w}",
        "python function that {w}",
        "write a function that {w}",
        "give me a python function that {w}",
        "code a function that {w}",
        "make a Python function that {w}",
        "write python code that {w}",
    ).format(w=wish)
    if rng.random() < 0.25:
        name = "_".join(rng.choice(common_words()) for _ in range(rng.randint(1, 2)))
        text += pick(rng, f" called {name}", f", call it {name}", f" named {name}")
    code = spec.code.replace("NAME", name).replace("CONSTANT", str(number))
    return Turn(polish(rng, text), f"```python\n{code}\n```")
