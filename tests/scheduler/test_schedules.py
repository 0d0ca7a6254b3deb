"""Random joins, cancels, acceptances, carried tokens, rewinds and missing rows: outputs equal the naive loop's."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.request import Request, SpeculationRequest
from app.core.step import DecodeStep, EngineLimits, FinishReason
from app.scheduler.scheduler import Scheduler
from tests.scheduler.scripted import VOCABULARY, Loop, ScriptedEngine, check_against_naive

RATES = st.sampled_from((0.0, 0.0, 0.1, 0.5))
WISHES = st.builds(
    SpeculationRequest,
    method=st.sampled_from(("auto", "auto", "off", "ngram", "draft_model")),
    num_draft_tokens=st.sampled_from((None, None, 0, 1, 4, 9)),
)
REQUESTS = st.builds(
    lambda prompt, max_tokens, stops, wish: Request(
        id="", prompt_tokens=tuple(prompt), max_tokens=max_tokens, stop_token_ids=stops, speculation=wish
    ),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=70),
    max_tokens=st.integers(1, 60),
    stops=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2),
    wish=WISHES,
)


@st.composite
def worlds(draw: st.DrawFn) -> Loop:
    chance = random.Random(draw(st.integers(0, 2**32)))
    luck = draw(st.sampled_from((0.0, 0.5, 0.9, 1.0)))
    limits = EngineLimits(
        max_context_tokens=draw(st.sampled_from((75, 100, 4_096))),
        max_rows=draw(st.integers(1, 4)),
        prefill_chunk_tokens=draw(st.sampled_from((1, 5, 16, 64))),
        drafters=("draft_model", "ngram"),
    )
    engine = ScriptedEngine(
        limits,
        accepts=lambda drafts: next((place for place in range(drafts) if chance.random() > luck), drafts),
        chance=chance,
        carry_rate=draw(RATES),
        rewind_rate=draw(RATES) / 5,
        missing_rate=draw(RATES),
        silent_rate=draw(RATES),
        cached_prefix_rate=draw(RATES),
    )
    return Loop(Scheduler(limits, policy=draw(st.sampled_from(("single", "auto")))), engine)


def drive(loop: Loop, requests: list[Request]) -> set[str]:
    """Submit at random turns and cancel some; return the ids of those that the cancellation ended."""
    chance, cancelled = loop.engine.chance, set()
    pending = list(requests)
    while pending or loop.scheduler.has_work:
        if pending and chance.random() < 0.2:
            loop.scheduler.submit(pending.pop(0))
        if chance.random() < 0.02:
            name = chance.choice(requests).id
            events = loop.scheduler.cancel(name)
            cancelled |= {event.request_id for event in events}
            loop.tell(events)
        loop.turn()
        check_counters(loop)
    return cancelled


def check_counters(loop: Loop) -> None:
    scheduler = loop.scheduler
    assert scheduler.running + len(scheduler._released) == len(loop.engine.rows)
    for name, sequence in scheduler._active.items():
        assert sequence.computed == len(loop.engine.rows[name]), "computed is not the cached length"


@settings(max_examples=80, deadline=None)
@given(loop=worlds(), wanted=st.lists(REQUESTS, min_size=1, max_size=7))
def test_every_schedule_tells_what_the_naive_loop_tells(loop: Loop, wanted: list[Request]) -> None:
    requests = [
        Request(
            id=f"r{place}",
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            speculation=request.speculation,
        )
        for place, request in enumerate(wanted)
    ]
    cancelled = drive(loop, requests)
    assert loop.admitted == [request.id for request in requests if request.id in loop.admitted], "not FIFO"
    assert sorted(loop.engine.freed) == sorted(loop.admitted)
    assert not loop.engine.rows
    for request in requests:
        end = loop.end(request.id)
        if request.id in cancelled:
            assert end.finish_reason is FinishReason.CANCELLED
        else:
            check_against_naive(loop, request)
        check_statistics(loop, request.id)


def check_statistics(loop: Loop, name: str) -> None:
    events, statistics = loop.events[name], loop.end(name).statistics
    stop_token = loop.end(name).finish_reason is FinishReason.STOP
    assert statistics.completion_tokens == len(loop.output(name)) + stop_token
    assert statistics.drafted == sum(event.drafted for event in events)
    assert 0 <= statistics.accepted - sum(event.accepted for event in events) <= stop_token
    assert statistics.accepted == sum(statistics.accepted_per_position)
    assert all(event.accepted <= min(event.drafted, len(event.tokens)) for event in events)
    rows = loop.decode_rows(name)
    if statistics.steps and not any(row.num_draft_tokens for row in rows):
        assert statistics.reason, "nothing was drafted and nobody says why"


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(2, 80), min_size=1, max_size=4),
    chunk=st.sampled_from((4, 16)),
    policy=st.sampled_from(("single", "auto", "off")),
)
def test_a_running_stream_never_waits_for_more_than_one_chunk(prompts: list[int], chunk: int, policy: str) -> None:
    limits = EngineLimits(4_096, 8, prefill_chunk_tokens=chunk, drafters=("ngram",))
    loop = Loop(Scheduler(limits, policy=policy), ScriptedEngine(limits))
    loop.scheduler.submit(Request(id="stream", prompt_tokens=(1,), max_tokens=400))
    loop.turn()
    for place, length in enumerate(prompts):
        loop.scheduler.submit(Request(id=f"r{place}", prompt_tokens=(2,) * length, max_tokens=5))
    while not loop.events["stream"][-1].finish_reason:
        loop.turn()
    streaming = [isinstance(plan, DecodeStep) for plan in loop.plans]
    assert all(before or after for before, after in pairwise(streaming))
