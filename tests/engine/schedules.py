"""One random schedule from a seed: requests, admissions, drafts and cancels, compared with the naive loop."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

from mlx import nn
from msgspec import msgpack
from msgspec.structs import replace

from app.core.request import UNQUANTISED, Quantisation, Request, SamplingParameters
from app.models.footprint import SHARED_TOKENS
from tests.engine.driving import Driver, Guided, Scripted, build, naive, quantised_caches
from tests.tiny import related_draft, tiny_model
from tests.tiny_drafters import tiny_drafter

VOCABULARY = 97
METHODS = ("draft_model", "ngram", "scripted")
FEATURE_METHODS = ("dflash", "eagle3", "mtp")
MOST_ROWS = 8
SCRIPTS = {
    "perfect": lambda _: 99,
    "always wrong": lambda _: 0,
    "wrong at the third": lambda _: 2,
    "ragged": lambda cycle: (cycle * 7) % 5,
}


@cache
def models(family: str, quantised: bool, head_size: int = 16) -> tuple[nn.Module, nn.Module]:
    """Return a target, and a draft model that often agrees with it; each pair is built once."""
    changes: dict[str, Any] = {"quantised": quantised, "head_size": head_size}
    return tiny_model(family, **changes), related_draft(family, **changes)


@lru_cache(4096)
def alone(family: str, quantised: bool, head_size: int, bits: int, packed: bytes) -> tuple[int, ...]:
    """Return the naive loop's answer, computed once per request: schedules of other drafters have the same requests."""
    request = msgpack.decode(packed, type=Request)
    target, _ = models(family, quantised, head_size)
    caches = quantised_caches(target, bits)
    return tuple(naive(target, request.prompt_tokens, request.max_tokens, request.sampling, caches))


@dataclass(frozen=True)
class Observation:
    """Counters of a schedule, so that a test can require that drafts really were verified."""

    output_tokens: int
    accepted: int
    cancelled: int
    widest: int
    """Largest number of rows in a step that verified drafts."""


def random_sampling(chance: random.Random) -> SamplingParameters:
    """Return greedy or seeded sampling with random penalties, truncation and bias."""
    return SamplingParameters(
        seed=chance.randrange(1 << 60),
        temperature=chance.choice([0.0, 0.0, 0.7, 1.0]),
        top_p=chance.choice([1.0, 0.9]),
        top_k=chance.choice([0, 20]),
        min_p=chance.choice([0.0, 0.05]),
        repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
        presence_penalty=chance.choice([0.0, 0.0, 0.5]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.3]),
        logit_bias=chance.choice([{}, {}, {3: 5.0, 7: -100.0}]),
        top_logprobs=chance.choice([None, None, 3]),
    )


def random_request(chance: random.Random, name: str, *, longest: int) -> Request:
    """Return a request with 1 to 40 prompt tokens, sometimes repetitive, and 1 to `longest` output tokens."""
    prompt = tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 40)))
    if chance.random() < 0.4:
        prompt = prompt[:6] * 4
    return Request(
        id=name, prompt_tokens=prompt, max_tokens=chance.randint(1, longest), sampling=random_sampling(chance)
    )


def run_schedule(
    family: str,
    seed: int,
    *,
    methods: tuple[str, ...] = METHODS,
    script: str = "ragged",
    quantised: bool = False,
    carry_over: bool = False,
    prefix_bytes: int = 0,
    sequences: int | None = None,
    longest: int = 16,
    cancel_rate: float = 0.02,
    rows: int = 1,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    quantisation: Quantisation = UNQUANTISED,
) -> Observation:
    """Run a schedule; assert that each output, up to its end or cancel, is the naive loop's, and no cache is left.

    While requests wait, at least `rows` run; more join at random. `sampling` overrides these parameters of all
    requests.
    """
    chance = random.Random(seed)
    head_size = 32 if quantisation.bits else 16
    target, draft = models(family, quantised, head_size)
    requests = [
        random_request(chance, f"r{index}", longest=longest) for index in range(sequences or chance.randint(1, 4))
    ]
    requests = [replace(original, sampling=replace(original.sampling, **sampling)) for original in requests]
    truth = {}
    for request in requests:
        bits = quantisation.bits_of(len(request.prompt_tokens))
        truth[request.id] = [*alone(family, quantised, head_size, bits, msgpack.encode(request))]
    guided = {
        method: Guided(tiny_drafter(method, family, target), truth, SCRIPTS[script])
        for method in methods
        if method in FEATURE_METHODS
    }
    engine = build(
        target,
        draft=draft,
        scripted=Scripted(truth, VOCABULARY, SCRIPTS[script]),
        features=guided,
        carry_over=carry_over,
        prefix_bytes=prefix_bytes,
        shared_tokens=(SHARED_TOKENS, 20)[seed % 2],
        quantisation=quantisation,
    )
    driver = Driver(engine, chance, methods, ride_tokens=chance.choice([1, 17]))
    waiting, cancelled = list(requests), 0
    while waiting or driver.live:
        while waiting and len(driver.live) < rows:
            driver.admit(waiting.pop(0))
        if waiting and len(driver.live) < MOST_ROWS and chance.random() < 0.3:
            driver.admit(waiting.pop(0))
        driver.step()
        if driver.live and chance.random() < cancel_rate:
            driver.leave(chance.choice(list(driver.live)))
            cancelled += 1
    for request in requests:
        output = driver.finished[request.id].output
        assert output == truth[request.id][: len(output)], (family, seed, methods, request.id)
    assert engine.runner.caches.nbytes == 0
    assert engine.cache_bytes == 0
    return Observation(
        output_tokens=sum(len(sequence.output) for sequence in driver.finished.values()),
        accepted=sum(sequence.accepted for sequence in driver.finished.values()),
        cancelled=cancelled,
        widest=driver.widest,
    )
