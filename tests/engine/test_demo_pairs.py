"""The demo models write JSON with forced keys: the same text as without a grammar, and never in more decode steps."""

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest

from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine.engine import Engine
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.scheduler.scheduler import Scheduler
from app.text.grammar.constraint import AnswerConstraint, Vocabulary
from app.text.prompt.template import TextModel
from tests.engine.test_constraints import schema_text
from tests.scheduler.scripted import Loop
from tests.shares import one_in

DEMO_MODELS = Path(__file__).resolve().parents[2] / "app" / "demo_models"
PAIRS = {
    "dflash": ("demo-assistant", "demo-assistant-dflash"),
    "eagle3": ("demo-assistant", "demo-assistant-eagle3"),
    "draft_model": ("demo-assistant", "demo-draft"),
    "ngram": ("demo-assistant", "demo-draft"),
    "mtp": ("demo-hybrid", "demo-hybrid-mtp"),
}
OBJECTS = {
    "Turn this into JSON: name: Ada, age: 36, city: Oslo": {"name": "string", "age": "integer", "city": "string"},
    "Write JSON with title Dune, author Frank, year 1965 and pages 412.": {
        "title": "string",
        "author": "string",
        "year": "integer",
        "pages": "integer",
    },
    "Make JSON with name Ada and age 36.": {"name": "string", "age": "integer"},
}
LEAST_GAIN = {1: 1.3, 3: 1.3, 8: 1.0}
"""Least ratio of steps without a grammar to steps with one, by draft length. With 8, objects take only 2 to 8 steps."""


@cache
def text_model(name: str) -> tuple[TextModel, Vocabulary]:
    text = TextModel.load(DEMO_MODELS / name)
    return text, Vocabulary(text.table)


def opened(method: str) -> Engine:
    target, draft = (DEMO_MODELS / name for name in PAIRS[method])
    drafter = DrafterSpecification(draft.name, str(draft), "draft_model" if method == "ngram" else method)
    loading = load_unit(ModelSpecification(id=target.name, path=str(target), drafters=(drafter,)))
    while True:
        try:
            next(loading)
        except StopIteration as finished:
            return open_engine(finished.value)


def cycles(engine: Engine, request: Request) -> tuple[list[int], int, int]:
    """Return an answer's tokens, their number and the number of decode steps; the prefix cache is emptied first."""
    engine.drop_prefix_cache()
    loop = Loop(Scheduler(engine.limits), engine)  # type: ignore[arg-type]
    loop.run(request)
    loop.free()
    statistics = loop.end(request.id).statistics
    return loop.output(request.id), statistics.completion_tokens, sum(method.steps for method in statistics.by_method)


@pytest.mark.parametrize(("method", "length"), one_in(3, [*PAIRS], [*LEAST_GAIN]))
def test_forced_keys_make_more_tokens_of_a_cycle_and_never_fewer(method: str, length: int) -> None:
    text, vocabulary = text_model(PAIRS[method][0])
    engine = opened(method)
    free_cycles = held_cycles = 0
    for index, (asked, fields) in enumerate(OBJECTS.items()):
        message = [{"role": "user", "content": asked}]
        prompt = text.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        free = Request(
            id=f"free-{index}",
            prompt_tokens=tuple(prompt),
            max_tokens=120,
            stop_token_ids=text.stop_token_ids,
            sampling=SamplingParameters(temperature=0.0),
            speculation=SpeculationRequest(method=method, num_draft_tokens=length),
        )
        properties = {name: {"type": kind} for name, kind in fields.items()}
        schema = {"type": "object", "properties": properties, "required": [*fields], "additionalProperties": False}
        constraint = AnswerConstraint(vocabulary, vocabulary.compile_grammar(schema_text(schema)), None)
        held = msgspec.structs.replace(free, id=f"held-{index}", constraint=constraint)
        free_text, free_tokens, without = cycles(engine, free)
        held_text, held_tokens, with_grammar = cycles(engine, held)
        assert held_text == free_text
        assert held_tokens == free_tokens
        assert set(json.loads(text.table.decode(held_text))) == set(fields)
        assert with_grammar <= without, asked
        free_cycles, held_cycles = free_cycles + without, held_cycles + with_grammar
    assert free_cycles >= LEAST_GAIN[length] * held_cycles, (free_cycles, held_cycles)
    engine.close()
