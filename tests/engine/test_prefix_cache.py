"""Hits in the prefix cache: the longest prefix shared with an owner's earlier prompts, nothing of another owner's."""

import gc
import random
import time
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest

from app.core.request import Request, SamplingParameters
from app.core.step import DecodeStep, PrefillRow, PrefillStep, StepPlan
from app.engine.engine import Engine
from app.engine.prefix.cache import PrefixCache
from app.engine.prefix.index import BLOCK_TOKENS, SHORTEST_TOKENS
from app.scheduler.scheduler import Scheduler
from tests.engine.driving import build
from tests.engine.schedules import models

GREEDY = SamplingParameters(temperature=0.0)


def read_prompt(engine: Engine, name: str, prompt: Sequence[int], *, owner: str = "") -> int:
    """Run a request that only prefills its prompt; return the number of cached tokens."""
    cached = engine.admit(Request(id=name, owner=owner, prompt_tokens=tuple(prompt), max_tokens=1, sampling=GREEDY))
    end = len(prompt) - 1
    if cached < end:
        engine.step(PrefillStep((PrefillRow(name, prompt, cached, end),)))
    engine.release(name, prompt[:end])
    return cached


def work_of(engine: Engine, name: str, prompt: Sequence[int], owner: str) -> tuple[int, list[tuple[str, int]]]:
    """Return all that an answer reveals about its cost: cached tokens, and the kind and width of each forward."""
    scheduler = Scheduler(engine.limits, policy="off")
    scheduler.submit(Request(id=name, owner=owner, prompt_tokens=tuple(prompt), max_tokens=2, sampling=GREEDY))
    request = scheduler.next_admission()
    assert request is not None
    cached = engine.admit(request)
    scheduler.admitted(name, cached)
    forwards = []
    while (plan := scheduler.plan()) is not None:
        forwards.append(shape_of(plan))
        scheduler.commit(engine.step(plan))
    for released, tokens in scheduler.drain_released():
        engine.release(released, tokens)
    return cached, forwards


def shape_of(plan: StepPlan) -> tuple[str, int]:
    if isinstance(plan, DecodeStep):
        return "decode", max(len(row.tokens) - row.computed for row in plan.rows)
    return "prefill", max(row.end - row.start for row in plan.rows)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mamba2"])
def test_a_prompt_is_found_by_its_owner_and_by_nobody_else(family: str) -> None:
    target, _ = models(family, False)
    engine = build(target, prefix_bytes=1 << 30)
    prompt = [5 * place % 97 for place in range(60)]
    assert read_prompt(engine, "first", prompt, owner="key 1") == 0
    assert read_prompt(engine, "stranger", prompt, owner="key 2") == 0
    assert read_prompt(engine, "keyless", prompt, owner="anonymous 0") == 0
    assert read_prompt(engine, "again", prompt, owner="key 1") == 59


def test_a_hundred_guesses_at_the_secret_of_another_key_all_look_the_same() -> None:
    target, _ = models("qwen3", False)
    engine = build(target, prefix_bytes=1 << 30)
    beginning = [7 * place % 97 for place in range(40)]
    work_of(engine, "secret", [*beginning, 4, 7, 1, 1], "key 1")
    guesses = [[*beginning, 4, 7, number // 10, number % 10] for number in range(100)]
    assert [*beginning, 4, 7, 1, 1] in guesses
    work_of(engine, "warm", [*beginning, 9, 9, 9, 9], "key 2")
    looks = [work_of(engine, f"guess {number}", guess, "key 2") for number, guess in enumerate(guesses)]
    own = [42 if number % 10 == 0 else 43 for number in range(100)]
    own[0] = 40
    assert [cached for cached, _ in looks] == own, "only what it said itself before"
    assert looks[11] == looks[12], "the right guess and its neighbour"


@pytest.mark.parametrize(("family", "seed"), [("qwen3", 1), ("qwen3", 2), ("mamba2", 3)])
def test_the_longest_own_beginning_is_found_however_long_the_prompts_are(family: str, seed: int) -> None:
    target, _ = models(family, False)
    engine = build(target, prefix_bytes=1 << 30, chunk_tokens=256)
    chance = random.Random(seed)
    said: list[tuple[str, list[int]]] = []
    restored = 0
    for number in range(60):
        owner = chance.choice(["key 1", "key 2"])
        prompt = [chance.choice([3, 4]) for _ in range(chance.randint(2, 3 * BLOCK_TOKENS))]
        if said and chance.random() < 0.8:  # continues an earlier prompt, mostly from its end
            known = chance.choice(said)[1]
            cut = chance.choice([len(known), chance.randint(0, len(known))])
            prompt = [*known[:cut], *prompt][: 5 * BLOCK_TOKENS]
        cached = read_prompt(engine, str(number), prompt, owner=owner)
        usable = [usable_tokens(family, known, prompt) for who, known in said if who == owner]
        assert cached == max((size for size in usable if size >= SHORTEST_TOKENS), default=0)
        said.append((owner, prompt[:-1]))
        restored += cached
    if family == "qwen3":
        assert engine.prefixes.restored_tokens == {"memory": restored, "disk": 0}


def usable_tokens(family: str, known: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many tokens of an earlier text a prompt can reuse, by comparing them one by one."""
    shared = 0
    while shared < min(len(known), len(prompt) - 1) and known[shared] == prompt[shared]:
        shared += 1
    return shared if family == "qwen3" or shared == len(known) else 0


@pytest.fixture
def fresh_buffers() -> Iterator[None]:
    """Let MLX reuse no buffer: one that it reuses is up to two pages larger than what it then holds."""
    usual = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(usual)


@pytest.mark.usefixtures("fresh_buffers")
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_what_is_kept_of_prompts_holds_no_more_memory_than_it_counts(family: str) -> None:
    target, _ = models(family, False)
    engine = build(target, prefix_bytes=1 << 30)
    for number, length in enumerate((30, 60, 120, 200)):
        read_prompt(engine, str(number), [(7 + number) * place % 97 for place in range(length)])
    engine.runner.clear()
    gc.collect()  # else what earlier tests left, or forwards that still run, may be freed in between
    mx.synchronize()
    counted, before = engine.prefix_cache_bytes, mx.get_active_memory()
    engine.drop_prefix_cache()
    assert before - mx.get_active_memory() <= counted


def test_kept_prompts_take_no_more_than_their_share_of_the_buffers_that_a_device_has() -> None:
    """On a Mac of 512 GB, prompts would meet Metal's limit on buffers long before their share of the memory is full."""
    target, _ = models("qwen3", False)
    share_bytes, limit_bytes = 1 << 20, 50 << 20
    for least_array_bytes, is_bounded in ((0, False), (share_bytes, True)):
        engine = build(target, prefix_bytes=limit_bytes)
        engine.prefixes = PrefixCache(limit_bytes, least_array_bytes=least_array_bytes, model_id="tiny")
        for number in range(40):
            read_prompt(engine, str(number), [(7 + number) * place % 97 for place in range(60)])
        memory = engine.prefixes.memory
        buffers = sum(len(memory.get(block.name) or ()) for block in memory)
        assert buffers
        assert (buffers <= limit_bytes // share_bytes) == is_bounded
        assert memory.nbytes <= limit_bytes


def test_a_crowded_cache_is_not_searched_entry_by_entry() -> None:
    target, _ = models("qwen3", False)

    def seconds_to_admit(entries: int) -> float:
        engine = build(target, prefix_bytes=1 << 30, chunk_tokens=4096)
        for number in range(entries):
            read_prompt(engine, f"{number}", [number % 90, number // 90, *[3] * 600])
        fastest = 1.0
        for trial in range(20):
            stranger = Request(id=f"new {trial}", prompt_tokens=(95, *[3] * 600), max_tokens=1)
            began = time.process_time()
            engine.admit(stranger)
            fastest = min(fastest, time.process_time() - began)
            engine.release(stranger.id, ())
        return fastest

    assert seconds_to_admit(120) < 5 * seconds_to_admit(2)
