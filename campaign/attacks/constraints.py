"""Legal schemas, expressions and grammars that are costly or cannot be met: no other client waits for them, and an
answer that ends by itself meets them.
"""

import json
import random
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import jsonschema
import regex

from campaign.attack import Arena
from campaign.chats import CHAT, chat

MATCH_SECONDS = 5.0
LETTERS = string.ascii_lowercase
ANSWER_SECONDS = 25.0
SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an answer, with a check of a text that ended by itself."""

    name: str
    fields: Mapping[str, Any]
    holds: Callable[[str], bool]
    tokens: int = 60


def words(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(LETTERS, k=length))


def of_schema(name: str, schema: Any, tokens: int = 60) -> Constraint:
    """Return a constraint to JSON by a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return Constraint(name, {"response_format": form}, lambda text: fits(schema, text), tokens)


def fits(schema: Any, text: str) -> bool:
    """Return whether a text is JSON that fits a schema; none fits one that only refers to itself."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError, jsonschema.SchemaError, RecursionError):
        return False
    return True


def of_regex(name: str, pattern: str, holds: Callable[[str], bool] | None = None) -> Constraint:
    """Return a constraint to a regular expression; `holds` replaces matching where that would take too long."""

    def matches(text: str) -> bool:
        try:
            return regex.fullmatch(pattern, text, timeout=MATCH_SECONDS) is not None
        except TimeoutError:
            return True  # undecided: not a failure

    return Constraint(name, {"structured_outputs": {"regex": pattern}}, holds or matches, tokens=400)


def of_grammar(name: str, grammar: str, least: int) -> Constraint:
    """Return a constraint to a grammar whose texts have at least `least` characters."""
    return Constraint(name, {"structured_outputs": {"grammar": grammar}}, lambda text: len(text) >= least, tokens=400)


def long_constant(chance: random.Random) -> Constraint:
    return of_schema("constant of 20,000 letters", {"const": words(chance, 20_000)}, tokens=3)


def constant_object(chance: random.Random) -> Constraint:
    schema = {"const": {f"k{number}": words(chance, 10) for number in range(2500)}}
    return of_schema("constant object of 2,500 keys", schema, tokens=1500)


def constant_text(chance: random.Random) -> Constraint:
    schema = {"const": " ".join(words(chance, chance.randint(1, 12)) for _ in range(8000))}
    return of_schema("constant of 8,000 words", schema, tokens=600)


def many_choices(chance: random.Random) -> Constraint:
    choices = [words(chance, 8) for _ in range(4500)]
    return Constraint("4,500 choices", {"structured_outputs": {"choice": choices}}, set(choices).__contains__, 3)


def many_values(chance: random.Random) -> Constraint:
    return of_schema("enumeration of 4,500", {"enum": [words(chance, 8) for _ in range(4500)]}, tokens=3)


def optional_properties(_chance: random.Random) -> Constraint:
    properties = {f"p{number}": {"type": "integer"} for number in range(2000)}
    return of_schema("2,000 optional properties", {"type": "object", "properties": properties}, tokens=3)


def alternatives(chance: random.Random) -> Constraint:
    schemas = [{"type": "object", "properties": {words(chance, 6): {"const": at}}} for at in range(300)]
    return of_schema("300 alternatives", {"anyOf": schemas})


def nested_counts(chance: random.Random) -> Constraint:
    inner, outer = chance.choice(((1000, 1000), (300, 3000), (10, 10)))
    return of_regex("nested counts", f"(a{{{inner}}}){{{outer}}}", lambda text: text == "a" * (inner * outer))


def self_reference(chance: random.Random) -> Constraint:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    return of_schema("reference to itself", chance.choice(({"$ref": "#"}, loop)))


def nested_repeats(_chance: random.Random) -> Constraint:
    return of_grammar("grammar of nested repeats", 'start: (("a"{1000}){1000}){1000}', 1000**3)


def endless_rules(chance: random.Random) -> Constraint:
    rules = [f'r{number}: "{words(chance, 5)}" r{number + 1} | r{number + 1} r{number + 1}' for number in range(200)]
    return of_grammar("grammar of ambiguous rules", "\n".join(["start: r0", *rules, 'r200: "z"']), 1)


def random_schema(chance: random.Random) -> Constraint:
    return of_schema("random schema", any_schema(chance, depth=chance.randint(1, 4)))


def any_schema(chance: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema that some value fits."""
    kind = chance.choice(
        ("string", "integer", "enum", "const", "boolean", *(["object", "array", "anyOf"] * 2 * (depth > 0)))
    )
    if kind == "object":
        names = [words(chance, chance.randint(1, 8)) for _ in range(chance.randint(0, 6))]
        properties = {name: any_schema(chance, depth - 1) for name in names}
        required = [name for name in properties if chance.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = chance.randint(0, 20)
        return {"type": "array", "items": any_schema(chance, depth - 1), "minItems": least, "maxItems": least + 5}
    if kind == "anyOf":
        return {"anyOf": [any_schema(chance, depth - 1) for _ in range(chance.randint(1, 4))]}
    if kind == "string":
        return {"type": "string", "maxLength": chance.randint(0, 40)}
    values = [words(chance, chance.randint(1, 30)) for _ in range(chance.randint(1, 20))]
    return {"enum": values} if kind == "enum" else {"const": values[0]} if kind == "const" else {"type": kind}


def random_regex(chance: random.Random) -> Constraint:
    return of_regex("random expression", any_regex(chance, depth=chance.randint(1, 5)))


def any_regex(chance: random.Random, depth: int) -> str:
    """Return a random expression that some text matches."""
    if depth == 0:
        return chance.choice(("a", "b", ".", r"\d", "[a-f]", "[^x]", r"\w", "ü", "x{0,50}"))
    inner = any_regex(chance, depth - 1)
    least = chance.randint(0, 40)
    return chance.choice(
        (
            f"({inner})*",
            f"({inner})+",
            f"({inner}){{{least},{least + 40}}}",
            f"({inner}|{any_regex(chance, depth - 1)})",
        )
    ) + chance.choice(("", any_regex(chance, depth - 1)))


CONSTRAINTS = (
    long_constant,
    constant_object,
    constant_text,
    many_choices,
    many_values,
    optional_properties,
    alternatives,
    nested_counts,
    self_reference,
    nested_repeats,
    endless_rules,
    random_schema,
    random_schema,
    random_regex,
    random_regex,
)


async def hostile_constraints(arena: Arena) -> None:
    """Try one after another for some seconds; the worker survives, and answers that ended by themselves fit."""
    ends_at = time.monotonic() + SECONDS
    async with arena.client() as client:
        for make in arena.chance.sample(CONSTRAINTS, len(CONSTRAINTS)):
            if time.monotonic() < ends_at:
                await hold_to(arena, client, make(arena.chance))


async def hold_to(arena: Arena, client: httpx2.AsyncClient, constraint: Constraint) -> None:
    """Request one answer under a constraint, and judge it."""
    before = arena.server.worker()
    arena.begin(constraint.name)
    body = chat("hello", max_tokens=constraint.tokens, **constraint.fields) | {"stream": False}
    try:
        answer = await client.post(CHAT, json=body, timeout=ANSWER_SECONDS)
    except httpx2.ReadTimeout:  # only others must not wait
        arena.findings.tried += 1
        return
    except httpx2.TransportError as error:
        arena.findings.failures.append(f"{constraint.name}: no answer ({type(error).__name__})")
        return
    arena.findings.answered(answer.status_code, answer.headers, answer.content, constraint.name)
    if answer.is_success:
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] or ""
        kept = choice["finish_reason"] != "stop" or constraint.holds(text)
        arena.findings.expect(kept, f"{constraint.name}: `stop` with {text[:60]!r}, which does not keep to it")
    arena.findings.expect(before == arena.server.worker(), f"{constraint.name}: the worker ended")
