"""The shape of one training conversation and the helpers every task uses to phrase a request."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

HELD_OUT_EVERY = 20


@dataclass
class Turn:
    """One request and its one right answer; `reasoning` goes into a think block."""

    request: str
    answer: str
    reasoning: str | None = None


@dataclass
class Sample:
    """A whole conversation of one task, with the tools it offers."""

    task: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    empty_think: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_key(self) -> str:
        """Text that decides on which side of the held-out split the sample falls."""
        return json.dumps([m.get("content") for m in self.messages if m["role"] == "user"])

    @property
    def held_out(self) -> bool:
        """Whether this conversation is kept out of training."""
        digest = hashlib.sha256(self.prompt_key.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


TurnMaker = Callable[[random.Random], Turn]

PREFIXES = ("please ", "can you ", "could you ", "now ", "i want you to ", "would you ", "ok, ", "hey, ")


def polish(rng: random.Random, text: str, *, imperative: bool = True) -> str:
    """Vary a request's politeness, capital letter and closing mark; never its meaning."""
    asked = False
    if imperative and rng.random() < 0.3:
        prefix = rng.choice(PREFIXES)
        asked = prefix.startswith(("can", "could", "would"))
        text = prefix + text
    if rng.random() < 0.1:
        text += " please" if rng.random() < 0.6 else ", please"
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.45:
        text += "?" if asked or not imperative else "."
    return text


def pick(rng: random.Random, *options: str) -> str:
    """Choose one of several phrasings."""
    return options[int(rng.random() * len(options))]


def join_items(rng: random.Random, items: Sequence[str]) -> str:
    """Write a list the ways people type one."""
    style = rng.random()
    if style < 0.45:
        return ", ".join(items)
    if style < 0.8 or len(items) < 2:
        return " ".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]
