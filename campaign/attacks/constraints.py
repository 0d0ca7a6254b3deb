"""Legal schemas, expressions and grammars that are costly or cannot be satisfied: no other client waits for them, and
an answer that ends by itself satisfies its constraint.
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

from campaign.attack import TurnContext
from campaign.chats import CHAT, chat

MATCH_SECONDS = 5.0
LETTERS = string.ascii_lowercase
ANSWER_SECONDS = 25.0
SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an answer, and a check of answers that ended by themselves."""

    name: str
    fields: Mapping[str, Any]
    is_met_by: Callable[[str], bool]
    tokens: int = 60


def random_letters(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(LETTERS, k=length))


def schema_constraint(name: str, schema: Any, tokens: int = 60) -> Constraint:
    """Return a constraint to JSON that fits a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return Constraint(name, {"response_format": form}, lambda text: fits(schema, text), tokens)


def fits(schema: Any, text: str) -> bool:
    """Return whether a text is JSON that fits a schema; no text fits a schema that only refers to itself."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError, jsonschema.SchemaError, RecursionError):
        return False
    return True


def regex_constraint(name: str, pattern: str, is_met_by: Callable[[str], bool] | None = None) -> Constraint:
    """Return a constraint to a regular expression; `is_met_by` replaces matching where that would take too long."""

    def matches(text: str) -> bool:
        try:
            return regex.fullmatch(pattern, text, timeout=MATCH_SECONDS) is not None
        except TimeoutError:
            return True  # undecided: not a failure

    return Constraint(name, {"structured_outputs": {"regex": pattern}}, is_met_by or matches, tokens=400)


def grammar_constraint(name: str, grammar: str, minimum: int) -> Constraint:
    """Return a constraint to a grammar whose texts have at least `minimum` characters."""
    return Constraint(name, {"structured_outputs": {"grammar": grammar}}, lambda text: len(text) >= minimum, tokens=400)


def long_constant(rng: random.Random) -> Constraint:
    return schema_constraint("constant of 20,000 letters", {"const": random_letters(rng, 20_000)}, tokens=3)


def constant_object(rng: random.Random) -> Constraint:
    schema = {"const": {f"k{number}": random_letters(rng, 10) for number in range(2500)}}
    return schema_constraint("constant object of 2,500 keys", schema, tokens=1500)


def constant_text(rng: random.Random) -> Constraint:
    schema = {"const": " ".join(random_letters(rng, rng.randint(1, 12)) for _ in range(8000))}
    return schema_constraint("constant of 8,000 words", schema, tokens=600)


def many_choices(rng: random.Random) -> Constraint:
    choices = [random_letters(rng, 8) for _ in range(4500)]
    return Constraint("4,500 choices", {"structured_outputs": {"choice": choices}}, set(choices).__contains__, 3)


def many_values(rng: random.Random) -> Constraint:
    return schema_constraint("enumeration of 4,500", {"enum": [random_letters(rng, 8) for _ in range(4500)]}, tokens=3)


def optional_properties(_chance: random.Random) -> Constraint:
    properties = {f"p{number}": {"type": "integer"} for number in range(2000)}
    return schema_constraint("2,000 optional properties", {"type": "object", "properties": properties}, tokens=3)


def alternatives(rng: random.Random) -> Constraint:
    schemas = [{"type": "object", "properties": {random_letters(rng, 6): {"const": at}}} for at in range(300)]
    return schema_constraint("300 alternatives", {"anyOf": schemas})


def nested_counts(rng: random.Random) -> Constraint:
    inner, outer = rng.choice(((1000, 1000), (300, 3000), (10, 10)))
    return regex_constraint("nested counts", f"(a{{{inner}}}){{{outer}}}", lambda text: text == "a" * (inner * outer))


def self_reference(rng: random.Random) -> Constraint:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    return schema_constraint("reference to itself", rng.choice(({"$ref": "#"}, loop)))


def nested_repeats(_chance: random.Random) -> Constraint:
    return grammar_constraint("grammar of nested repeats", 'start: (("a"{1000}){1000}){1000}', 1000**3)


def endless_rules(rng: random.Random) -> Constraint:
    rules = [
        f'r{number}: "{random_letters(rng, 5)}" r{number + 1} | r{number + 1} r{number + 1}' for number in range(200)
    ]
    return grammar_constraint("grammar of ambiguous rules", "\n".join(["start: r0", *rules, 'r200: "z"']), 1)


def random_schema(rng: random.Random) -> Constraint:
    return schema_constraint("random schema", any_schema(rng, depth=rng.randint(1, 4)))


def any_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema that some value fits."""
    kind = rng.choice(
        ("string", "integer", "enum", "const", "boolean", *(["object", "array", "anyOf"] * 2 * (depth > 0)))
    )
    if kind == "object":
        names = [random_letters(rng, rng.randint(1, 8)) for _ in range(rng.randint(0, 6))]
        properties = {name: any_schema(rng, depth - 1) for name in names}
        required = [name for name in properties if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        minimum = rng.randint(0, 20)
        return {"type": "array", "items": any_schema(rng, depth - 1), "minItems": minimum, "maxItems": minimum + 5}
    if kind == "anyOf":
        return {"anyOf": [any_schema(rng, depth - 1) for _ in range(rng.randint(1, 4))]}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 40)}
    values = [random_letters(rng, rng.randint(1, 30)) for _ in range(rng.randint(1, 20))]
    return {"enum": values} if kind == "enum" else {"const": values[0]} if kind == "const" else {"type": kind}


def random_regex(rng: random.Random) -> Constraint:
    return regex_constraint("random expression", any_regex(rng, depth=rng.randint(1, 5)))


def any_regex(rng: random.Random, depth: int) -> str:
    """Return a random expression that some text matches."""
    if depth == 0:
        return rng.choice(("a", "b", ".", r"\d", "[a-f]", "[^x]", r"\w", "ü", "x{0,50}"))
    inner = any_regex(rng, depth - 1)
    minimum = rng.randint(0, 40)
    return rng.choice(
        (
            f"({inner})*",
            f"({inner})+",
            f"({inner}){{{minimum},{minimum + 40}}}",
            f"({inner}|{any_regex(rng, depth - 1)})",
        )
    ) + rng.choice(("", any_regex(rng, depth - 1)))


MakeConstraint = Callable[[random.Random], Constraint]
CONSTRAINTS: tuple[MakeConstraint, ...] = (
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


def constraints_after(tried: int, rng: random.Random) -> list[MakeConstraint]:
    """Return the constraints to try after the first `tried`: each kind once in order, since memory that the dearest
    takes only late looks like a leak; then all at random."""
    return [*CONSTRAINTS[tried:], *rng.sample(CONSTRAINTS, len(CONSTRAINTS))]


async def hostile_constraints(context: TurnContext) -> None:
    """Try one constraint after another for some seconds; the worker must survive, and complete answers fit."""
    ends_at = time.monotonic() + SECONDS
    async with context.client() as client:
        for make in constraints_after(context.tried, context.rng):
            if time.monotonic() < ends_at:
                await request_constrained(context, client, make(context.rng))


async def request_constrained(context: TurnContext, client: httpx2.AsyncClient, constraint: Constraint) -> None:
    """Request one answer under a constraint, and judge it."""
    before = context.server.worker()
    context.begin(constraint.name)
    body = chat("hello", max_tokens=constraint.tokens, **constraint.fields) | {"stream": False}
    try:
        answer = await client.post(CHAT, json=body, timeout=ANSWER_SECONDS)
    except httpx2.ReadTimeout:  # no failure: only other clients must not wait
        context.findings.tried += 1
        return
    except httpx2.TransportError as error:
        context.findings.failures.append(f"{constraint.name}: no answer ({type(error).__name__})")
        return
    context.findings.count_response(answer.status_code, answer.headers, answer.content, constraint.name)
    if answer.is_success:
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] or ""
        is_met = choice["finish_reason"] != "stop" or constraint.is_met_by(text)
        context.findings.expect(is_met, f"{constraint.name}: `stop` with {text[:60]!r}, which does not keep to it")
    context.findings.expect(before == context.server.worker(), f"{constraint.name}: the worker ended")
