"""Constrained answers: always valid, the same with speculation on and off; forced tokens are drafted for free."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import jsonschema
import llguidance
import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.core.messages import Generate
from app.core.request import Grammar, Reasoning, Request, SamplingParameters, SpeculationRequest
from app.core.step import DecodeRow, StepPlan, StepResult
from app.core.unit import ModelSpecification
from app.engine.constraints import Constraints
from app.engine.drafters.drafter import Drafter
from app.engine.engine import Engine
from app.engine.sampling.drawing import SampledRow, adjust, draw
from app.models.drafters.methods import FEATURE_METHODS
from app.scheduler.scheduler import Scheduler
from app.text.detokenizer import TokenTable
from app.text.dialect import NO_DIALECT
from app.text.grammar.constraint import AnswerConstraint, Vocabulary
from app.text.grammar.request_grammar import answer_grammar
from tests.engine.driving import Driver, Guided, Scripted, build
from tests.scheduler.scripted import Loop
from tests.shares import one_in
from tests.tiny import related_draft, tiny_model
from tests.tiny_drafters import tiny_drafter

LETTERS = [bytes([letter]) for letter in range(32, 127)]
WORDS = [
    b"\n",
    b"\n\n",
    b'{"',
    b'": ',
    b'", "',
    b'"}',
    b", ",
    b'name"',
    b"true",
    b"false",
    b"null",
    b"</think>",
    b"<think>",
]
END = len(LETTERS) + len(WORDS)
PIECES = [*LETTERS, *WORDS, b"<end>"]
PROMPT = tuple(PIECES.index(bytes([letter])) for letter in b"Say it in JSON: ")
TABLE = TokenTable(
    pieces=PIECES,
    stop_token_ids=frozenset({END}),
    hidden_token_ids=frozenset({END}),
    vocabulary_size=len(PIECES) + 3,
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITIZEN = {
    "type": "object",
    "properties": {"given_name": {"enum": ["Ada", "Bo"]}, "year_of_birth": {"type": "integer", "maximum": 99}},
    "required": ["given_name", "year_of_birth"],
    "additionalProperties": False,
}
SHORT = {PIECES.index(b'"'): 3.0, PIECES.index(b'", "'): 3.0, PIECES.index(b'"}'): 3.0}
"""Logit bias that ends strings, so that most texts of a random model end."""


SEEDS = 1_500


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TABLE)


@cache
def models() -> tuple[nn.Module, nn.Module]:
    target = tiny_model("qwen3", vocabulary_size=TABLE.vocabulary_size)
    return target, related_draft("qwen3", vocabulary_size=TABLE.vocabulary_size)


def schema_text(schema: Any) -> str:
    wish = Grammar(kind="json_schema", text=json.dumps(schema))
    asked = Generate(id="", model=ModelSpecification(id="", path=""), text="x", grammar=wish)
    grammar = answer_grammar(asked, NO_DIALECT)
    assert grammar is not None
    return grammar.text


def said(tokens: Sequence[int]) -> str:
    return b"".join(TABLE.pieces[token] for token in tokens if token != END).decode()


def request(name: str, grammar: str, *, reasoning: Reasoning | None = None, **sampling: Any) -> Request:
    enforced = vocabulary().compile_grammar(grammar) if grammar else None
    assert enforced is None or not enforced.matcher.is_error(), enforced.matcher.get_error()
    return Request(
        id=name,
        prompt_tokens=PROMPT,
        max_tokens=64,
        stop_token_ids=frozenset({END}),
        sampling=SamplingParameters(logit_bias=SHORT, **sampling),
        constraint=AnswerConstraint(vocabulary(), enforced, reasoning),
    )


def naive_answer(model: nn.Module, grammar: str, sampling: SamplingParameters, most: int = 64) -> list[int]:
    """Run the naive loop: one row, one token at a time, masked by a new matcher that has read the whole output."""
    cache, tokens = make_prompt_cache(model), list(PROMPT)
    mx.eval(model(mx.array([tokens[:-1]]), cache=cache))
    while len(tokens) < len(PROMPT) + most and tokens[-1] != END:
        logits = model(mx.array([[tokens[-1]]]), cache=cache).astype(mx.float32)
        row = [SampledRow(sampling, tokens, len(PROMPT))]
        matcher = llguidance.LLMatcher(vocabulary().tokenizer, grammar)
        assert matcher.consume_tokens(tokens[len(PROMPT) :]) or len(tokens) == len(PROMPT)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.zeros(TABLE.vocabulary_size, bool)
        allowed[: len(PIECES)] = bits[: len(PIECES)]
        tokens.append(int(draw(mx.where(mx.array(allowed), adjust(logits, row, None), -mx.inf), row).item()))
    return tokens[len(PROMPT) :]


def run(engine: Engine, requests: Sequence[Request], *, seed: int = 0, methods: Sequence[str] = ("ngram",)) -> Driver:
    """Run random steps until all requests are done; a text ends at `END`."""
    driver = Driver(engine, random.Random(seed), methods)
    for admitted in requests:
        driver.admit(admitted)
    while driver.live:
        driver.step()
        for name, live in list(driver.live.items()):
            if END in live.output:
                driver.leave(name)
    return driver


def answer(driver: Driver, name: str) -> list[int]:
    output = driver.finished[name].output
    return output[: output.index(END) + 1] if END in output else output


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["draft_model", "ngram", "scripted"])
def test_an_answer_says_what_the_naive_loop_says_under_the_same_grammar(method: str, temperature: float) -> None:
    target, draft = models()
    grammar = schema_text(PERSON)
    for seed in range(3):
        sampling: dict[str, Any] = {"temperature": temperature, "seed": seed}
        truth = naive_answer(target, grammar, SamplingParameters(logit_bias=SHORT, **sampling))
        script = Scripted({"a": truth + [0] * 64}, TABLE.vocabulary_size, lambda cycle: cycle % 4)
        engine = build(target, draft=draft, scripted=script, vocabulary=TABLE.vocabulary_size)
        driver = run(engine, [request("a", grammar, **sampling)], seed=seed, methods=(method,))
        assert answer(driver, "a") == truth
        if truth[-1] == END:
            jsonschema.validate(json.loads(said(truth)), PERSON)


def test_rows_with_and_without_a_grammar_share_a_batch() -> None:
    target, draft = models()
    grammar = schema_text(PERSON)
    held = [request(f"held{seed}", grammar, temperature=0.8, seed=seed) for seed in range(2)]
    free = [
        Request(id=f"free{seed}", prompt_tokens=PROMPT, max_tokens=24, sampling=SamplingParameters(seed=seed))
        for seed in range(2)
    ]
    alone = {lone.id: run(build(target, draft=draft, vocabulary=112), [lone]).finished[lone.id].output for lone in free}
    driver = run(build(target, draft=draft, vocabulary=112), [*held, *free], seed=3, methods=("draft_model", "ngram"))
    for row in held:
        sampling = row.sampling
        assert answer(driver, row.id) == naive_answer(target, grammar, sampling)
    for row in free:
        assert driver.finished[row.id].output[:24] == alone[row.id][:24] or END in alone[row.id]


def test_log_probabilities_of_a_row_with_a_grammar_are_the_models_own_whatever_runs_beside_it() -> None:
    rows = [DecodeRow(name, PROMPT, len(PROMPT), len(PROMPT) - 1, 8) for name in ("bound", "free")]
    sampled = [SampledRow(SamplingParameters(), row.tokens, row.prompt_length) for row in rows]
    constraints = Constraints()
    constraints.admit(request("bound", schema_text(PERSON)))
    for beside in (1, 2):
        logits = mx.zeros((beside, 1, TABLE.vocabulary_size))
        masked, _ = constraints.mask(logits, rows[:beside], sampled[:beside])
        assert mx.isinf(masked).any(axis=(1, 2)).tolist() == [True, False][:beside]
        assert not mx.isinf(logits).any(), "they are scored after the mask"


def test_reasoning_is_free_and_the_answer_behind_it_is_held() -> None:
    target, draft = models()
    closing = Reasoning(opening="<think>", closing="</think>", inside=True, most_tokens=7)
    for seed in range(3):
        asked = request("a", schema_text(PERSON), reasoning=closing, temperature=1.0, seed=seed)
        engine = build(target, draft=draft, vocabulary=TABLE.vocabulary_size)
        text = said(answer(run(engine, [asked], seed=seed, methods=("draft_model", "ngram")), "a"))
        thought, _, rest = text.partition("</think>")
        assert len(thought) <= 7 * 9
        assert '{"name": "'.startswith(rest.strip()[:10]) or rest.strip().startswith('{"name": "')


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["draft_model", "ngram", "scripted"])
@pytest.mark.parametrize("liked", ["Z", "<think>"])
def test_reasoning_begins_only_where_the_model_itself_would_begin_it(
    liked: str, method: str, temperature: float
) -> None:
    """`<think>` is likelier than any token that the grammar allows; reasoning begins only if it is likeliest of all."""
    target, draft = models()
    mark, wish = PIECES.index(b"<think>"), PIECES.index(liked.encode())
    bias = {mark: 30.0, wish: 60.0, PIECES.index(b"</think>"): 20.0}
    asked = msgspec.structs.replace(
        request("a", schema_text({"const": True}), reasoning=Reasoning(opening="<think>", closing="</think>")),
        sampling=SamplingParameters(temperature=temperature, seed=5, logit_bias=bias),
    )
    script = Scripted({"a": [mark, *[0] * 64]}, TABLE.vocabulary_size, lambda _: 1)
    engine = build(target, draft=draft, scripted=script, vocabulary=TABLE.vocabulary_size)
    text = said(answer(run(engine, [asked], methods=(method,)), "a"))
    assert text.startswith("<think>") == (liked == "<think>")
    assert liked == "<think>" or text == "true"


def test_how_often_reasoning_begins_is_how_often_the_model_begins_it() -> None:
    """The mark has probability 0.3, the token `true`, which the grammar allows, 0.01. Each seed draws once."""
    mark, held = PIECES.index(b"<think>"), Constraints()
    chances = np.full(TABLE.vocabulary_size, 0.69 / (TABLE.vocabulary_size - 2))
    chances[mark], chances[PIECES.index(b"true")] = 0.3, 0.01
    begun = request("0", schema_text({"const": True}), reasoning=Reasoning(opening="<think>", closing="</think>"))
    rows, sampled = [], []
    for seed in range(SEEDS):
        held.admit(msgspec.structs.replace(begun, id=str(seed)))
        rows.append(DecodeRow(str(seed), PROMPT, len(PROMPT), len(PROMPT) - 1, 64))
        sampled.append(SampledRow(SamplingParameters(seed=seed), PROMPT, len(PROMPT)))
    logits = mx.broadcast_to(mx.log(mx.array(chances.astype(np.float32))), (SEEDS, 1, TABLE.vocabulary_size))
    drawn: Any = draw(held.mask(logits, rows, sampled)[0], sampled)[:, 0].tolist()
    assert drawn.count(mark) / SEEDS == pytest.approx(0.3, abs=4 * (0.21 / SEEDS) ** 0.5)
    assert {bytes(PIECES[token])[:1] for token in drawn} == {b"<", b"\n", b"t"}, (
        "a line break may stand before the mark"
    )


def test_reasoning_that_takes_too_long_is_closed_at_its_budget_in_every_schedule() -> None:
    target, draft = models()
    closing = Reasoning(opening="<think>", closing="</think>", inside=True, most_tokens=9)
    mark = PIECES.index(b"</think>")
    texts = []
    for seed, methods in enumerate((("draft_model",), ("ngram",), ("draft_model", "ngram"))):
        asked = request("a", "", reasoning=closing, temperature=0.0)
        driver = run(build(target, draft=draft, vocabulary=TABLE.vocabulary_size), [asked], seed=seed, methods=methods)
        texts.append(answer(driver, "a"))
    assert all(mark in text[:10] for text in texts)
    assert texts[0] == texts[1] == texts[2]


names = some.text("abcdef_", min_size=1, max_size=4)
leaves = some.one_of(
    some.just({"type": "boolean"}),
    some.just({"type": "null"}),
    some.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        some.integers(-50, 50),
        some.integers(0, 90),
    ),
    some.builds(lambda most: {"type": "string", "maxLength": most}, some.integers(0, 6)),
    some.builds(
        lambda values: {"enum": values}, some.lists(some.one_of(names, some.integers(0, 9)), min_size=1, max_size=3)
    ),
    some.just({"type": "string", "pattern": "^[a-c]{2,3}-[0-9]$"}),
    some.just({"type": "string", "format": "date"}),
)


def nested(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    objects = some.builds(
        lambda fields, wanted: {
            "type": "object",
            "properties": fields,
            "required": [name for name, keep in zip(fields, wanted, strict=False) if keep],
            "additionalProperties": False,
        },
        some.dictionaries(names, inner, max_size=3),
        some.lists(some.booleans(), min_size=3, max_size=3),
    )
    arrays = some.builds(
        lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
        inner,
        some.integers(0, 2),
        some.integers(0, 2),
    )
    return some.one_of(
        objects,
        arrays,
        some.builds(lambda choices: {"anyOf": choices}, some.lists(inner, min_size=1, max_size=2)),
    )


schemas = some.recursive(leaves, nested, max_leaves=6)


METHODS = {"qwen3": ("draft_model", "ngram", "scripted", "dflash", "eagle3"), "qwen3_next": ("ngram", "mtp")}
"""Methods to test, by target family; together, every drafter there is. `Guided` gives feature drafters right tokens."""


@cache
def shared_engine(family: str) -> tuple[nn.Module, Engine, dict[str, list[int]]]:
    """Return a target, an engine with all its drafters, and a dictionary for the right outputs of later requests."""
    size = TABLE.vocabulary_size
    target, truth = tiny_model(family, vocabulary_size=size), dict[str, list[int]]()
    heads = [method for method in METHODS[family] if method in FEATURE_METHODS]
    features: dict[str, Drafter] = {
        method: Guided(tiny_drafter(method, family, target, vocabulary_size=size), truth, lambda cycle: cycle % 4)
        for method in heads
    }
    script = Scripted(truth, size, lambda cycle: cycle % 4)
    draft = related_draft(family, vocabulary_size=size)
    return target, build(target, draft=draft, scripted=script, features=features, vocabulary=size), truth


class Secretive(AnswerConstraint):
    """Constraint that masks tokens but does not reveal which ones it forces."""

    def begin(self) -> "Secretive":
        return Secretive(self._vocabulary, self._initial_state, self._reasoning)

    def forced(self, output: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return ()

    def forced_after(self, output: Sequence[int], drafts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        return super().forced_after(output, drafts)[0], ()


@dataclass
class Timed:
    """Engine with simulated times: each verified draft takes a fifth of a plain step, and drafting takes no time."""

    engine: Engine

    def __post_init__(self) -> None:
        self.admit, self.release = self.engine.admit, self.engine.release

    def step(self, plan: StepPlan) -> StepResult:
        result = self.engine.step(plan)
        return replace(result, seconds=0.01 * (1 + 0.2 * (result.width - 1)), phase_seconds=None)


def tokens_per_cycle(engine: Engine, asked: Request, truth: Sequence[int], *methods: str) -> float:
    """Run a request whose answer is `truth` through the real scheduler; return its tokens per decode step."""
    loop = Loop(Scheduler(replace(engine.limits, drafters=methods)), Timed(engine))  # type: ignore[arg-type]
    loop.run(asked)
    assert loop.output("a") == [token for token in truth if token != END]
    statistics = loop.end("a").statistics
    return statistics.completion_tokens / sum(method.steps for method in statistics.by_method)


@pytest.mark.parametrize(
    ("way", "temperature"),
    one_in(2, [(family, method) for family in METHODS for method in (*METHODS[family], "auto")], [0.0, 0.8]),
)
def test_forced_keys_make_more_tokens_of_a_cycle_than_the_same_text_without_them(
    way: tuple[str, str], temperature: float
) -> None:
    """Each cycle has one draft (`auto` may choose more); scripts make the first draft right three times in four."""
    family, method = way
    target, engine, known = shared_engine(family)
    grammar, sampling = schema_text(CITIZEN), {"temperature": temperature, "seed": 4}
    truth = naive_answer(target, grammar, SamplingParameters(logit_bias=SHORT, **sampling), most=128)
    known["a"] = truth + [0] * 64
    asked = msgspec.structs.replace(
        request("a", grammar, **sampling),
        max_tokens=128,
        speculation=SpeculationRequest(method=method, num_draft_tokens=None if method == "auto" else 1),
    )
    constraint = Secretive(vocabulary(), vocabulary().compile_grammar(grammar), None)
    methods = METHODS[family] if method == "auto" else (method,)
    free = tokens_per_cycle(engine, msgspec.structs.replace(asked, constraint=constraint), truth, *methods)
    assert tokens_per_cycle(engine, asked, truth, *methods) >= 1.3 * free


class Costly(AnswerConstraint):
    """Constraint whose masks are so slow that it can afford only two drafts."""

    affordable_drafts = 2

    def begin(self) -> "Costly":
        return Costly(self._vocabulary, self._initial_state, self._reasoning)


@pytest.mark.parametrize("by_rejection", [False, True])
def test_a_row_with_slow_masks_drafts_no_more_than_it_can_afford(by_rejection: bool) -> None:
    row = DecodeRow("a", [*PROMPT], len(PROMPT), len(PROMPT) - 1, 64, num_draft_tokens=7, max_draft_tokens=15)
    for kind, most in ((AnswerConstraint, 15), (Costly, 2)):
        constraints = Constraints(by_rejection=by_rejection)
        held = kind(vocabulary(), vocabulary().compile_grammar(schema_text(CITIZEN)), None)
        constraints.admit(msgspec.structs.replace(request("a", ""), constraint=held))
        led = constraints.with_forced_drafts(row)
        assert (led.num_draft_tokens, led.max_draft_tokens, len(led.forced)) == (min(7, most), most, min(7, most))


@pytest.mark.parametrize("length", [2, 4, 7])
def test_a_draft_model_keeps_nothing_that_the_grammar_put_other_tokens_in_the_place_of(length: int) -> None:
    target, draft = models()
    engine = build(target, draft=draft, vocabulary=TABLE.vocabulary_size)
    runner = engine.drafters.runners["draft_model"]
    loop = Loop(Scheduler(replace(engine.limits, drafters=("draft_model",))), engine)  # type: ignore[arg-type]
    speculation = SpeculationRequest(method="draft_model", num_draft_tokens=length)
    asked = request("a", schema_text(CITIZEN), temperature=0.0)
    loop.scheduler.submit(msgspec.structs.replace(asked, speculation=speculation))
    compared = 0
    while loop.scheduler.has_work:
        loop.turn()
        tokens = [*PROMPT, *(loop.output("a") if "a" in loop.events else ())]
        if "a" not in runner.caches.table.slots or not (held := runner.length("a")):
            continue
        assert held <= len(tokens)
        runner.claim("afresh")
        _, forward = runner.forward(["afresh"], mx.array([tokens[:held]]), [held])
        runner.commit(forward, [held])
        for layer, afresh in zip(
            runner.caches.read_span("a", 0, held), runner.caches.read_span("afresh", 0, held), strict=True
        ):
            assert all(mx.allclose(a, b, atol=1e-3).item() for a, b in zip(layer, afresh, strict=True))
        runner.release("afresh")
        compared += 1
    assert compared > 2


def test_a_row_whose_masks_are_too_slow_for_drafts_says_so() -> None:
    class TooCostly(Costly):
        affordable_drafts = 0

        def begin(self) -> "TooCostly":
            return TooCostly(self._vocabulary, self._initial_state, self._reasoning)

    target, draft = models()
    engine = build(target, draft=draft, vocabulary=TABLE.vocabulary_size)
    reasons = Counter[str]()

    @dataclass
    class Watched(Timed):
        def step(self, plan: StepPlan) -> StepResult:
            result = super().step(plan)
            reasons.update(outcome.why_not_drafted.code for outcome in result.outcomes)
            return result

    loop = Loop(Scheduler(replace(engine.limits, drafters=("draft_model",))), Watched(engine))  # type: ignore[arg-type]
    held = TooCostly(vocabulary(), vocabulary().compile_grammar(schema_text(CITIZEN)), None)
    speculation = SpeculationRequest(method="draft_model", num_draft_tokens=4)
    loop.run(msgspec.structs.replace(request("a", ""), constraint=held, speculation=speculation))
    assert set(reasons) == {"slow_masks"}


def forced_text(constraint: AnswerConstraint, output: Sequence[int] = ()) -> str:
    return said([usual for usual, *_ in constraint.forced(output)])


def test_what_is_forced_may_be_spelled_in_other_ways_that_the_grammar_allows() -> None:
    held = AnswerConstraint(vocabulary(), vocabulary().compile_grammar(schema_text(CITIZEN)), None)
    assert forced_text(held) == '{"given_name": '
    output: list[int] = []
    for usual, *others in held.forced(()):
        masks = np.full((1, 4), -1, np.int32)
        held.allow(output, (), masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        assert {usual, *others} == set(allowed.tolist())
        output.append(usual)
    assert len(held.forced(())[0]) == 1


def test_what_is_forced_stands_behind_the_drafts_and_in_place_of_the_first_wrong_one() -> None:
    held = AnswerConstraint(vocabulary(), vocabulary().compile_grammar(schema_text(CITIZEN)), None)
    begun = vocabulary()(b'{"given_name": ')
    for drafts, kept in ((b'"A', b'"A'), (b'"Axx', b'"A'), (b"x", b"")):
        count, forced = held.forced_after(begun, vocabulary()(drafts))
        assert count == len(vocabulary()(kept))
        assert (said(forced) == 'da", "year_of_birth":') == (kept == b'"A'), said(forced)
    assert held.forced_after(begun, [len(PIECES) + 2]) == (0, ()), "an id that no text has"
    ended = [*vocabulary()(b'"Bo", "year_of_birth": 7}'), END]
    assert held.forced_after(begun, ended) == (len(ended), ())


def hold_schemas(examples: int) -> tuple[Counter[str], int]:
    """Check that all drafters give one text, valid if it ended. Return counts of accepted drafts and ended texts."""
    accepted, ended, most = Counter[str](), 0, 32

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schema=schemas, seed=some.integers(0, 1000))
    def check(schema: Any, seed: int) -> None:
        nonlocal ended
        grammar = schema_text(schema)
        for family, temperature in product(METHODS, (0.0, 0.8)):
            target, engine, known = shared_engine(family)
            sampling: dict[str, Any] = {"temperature": temperature, "seed": seed}
            truth = naive_answer(target, grammar, SamplingParameters(logit_bias=SHORT, **sampling), most=most)
            if truth[-1] == END:
                jsonschema.validate(json.loads(said(truth)), schema)
                ended += 1
            known.update(dict.fromkeys(METHODS[family], truth + [0] * 64))
            asked = msgspec.structs.replace(request("", grammar, **sampling), max_tokens=most)
            batch = [msgspec.structs.replace(asked, id=method) for method in METHODS[family]]
            driver = run(engine, batch, seed=seed, methods=METHODS[family])
            for method in METHODS[family]:
                assert answer(driver, method) == truth, (family, method)
                accepted[method] += driver.finished[method].accepted

    check()
    return accepted, ended


def test_any_schema_is_kept_and_its_text_is_the_same_whoever_drafts() -> None:
    accepted, ended = hold_schemas(12)
    assert set(accepted) == {method for methods in METHODS.values() for method in methods}
    assert min(accepted.values()) > 0
    assert ended > 24


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_five_hundred_schemas_are_kept_whoever_drafts() -> None:
    accepted, ended = hold_schemas(500)
    assert min(accepted.values()) > 0
    assert ended > 1000
