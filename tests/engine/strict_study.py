"""Counts texts that diverge from plain decoding's under `coupled` and `strict`, on models with many near ties of two
tokens: `python -m tests.engine.strict_study qwen3_next float32 draft_model 500`. Uses OpenBLAS if it is installed.

The study needs its own process, because OpenBLAS must be loaded before mlx is imported.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from app.engine.platform import prepare

OPENBLAS = prepare(environment={}).openblas if __name__ == "__main__" else False

import mlx.core as mx  # noqa: E402
from mlx import nn  # noqa: E402

from app.core.request import Request, SpeculationRequest  # noqa: E402
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep  # noqa: E402
from app.engine.engine import Engine  # noqa: E402
from tests.engine.driving import build  # noqa: E402
from tests.engine.schedules import VOCABULARY, random_sampling  # noqa: E402
from tests.tiny import related_draft, tiny_model  # noqa: E402

TWIN_DISTANCE = 3e-6
"""Relative difference of a token's row in the head and its twin's: about as much as OpenBLAS shifts a logit."""
LONGEST_DRAFT, ANSWER_TOKENS = 7, 32


@dataclass
class Study:
    """Numbers of texts that diverged from plain decoding's; for `strict`, counts of tokens and of close calls too."""

    openblas: bool
    coupled_parted: int = 0
    strict_parted: int = 0
    tokens: int = 0
    accepted: int = 0
    close_calls: int = 0
    replayed: int = 0


@dataclass
class Answer:
    """Tokens of an answer, and counts from its steps."""

    tokens: list[int]
    accepted: int = 0
    close_calls: int = 0
    replayed: int = 0


def twinned(model: nn.Module) -> nn.Module:
    """Make every odd token of the model nearly as likely as the even token before it; return the model."""
    weight = model.lm_head.weight
    near = weight + TWIN_DISTANCE * mx.abs(weight) * mx.random.normal(weight.shape, key=mx.random.key(0))
    tokens = mx.arange(len(weight))
    model.lm_head.weight = mx.where((tokens % 2 == 1)[:, None], near[tokens - tokens % 2], weight)
    mx.eval(model.parameters())
    return model


def decode(engine: Engine, request: Request, method: str, drafts: Callable[[], int]) -> Answer:
    """Return the answer to a request that runs alone, with at most `drafts()` drafts in each step."""
    tokens, prompt, answer = list(request.prompt_tokens), len(request.prompt_tokens), Answer([])
    computed = engine.admit(request)
    if computed < prompt - 1:
        engine.step(PrefillStep((PrefillRow(request.id, tokens, computed, prompt - 1),)))
        computed = prompt - 1
    while (remaining := request.max_tokens - (len(tokens) - prompt)) > 0:
        count = min(drafts(), remaining - 1)
        row = DecodeRow(request.id, tokens, prompt, computed, remaining, method if count else "off", count)
        for outcome in engine.step(DecodeStep((row,))).outcomes:
            tokens.extend(outcome.emitted)
            computed = outcome.computed
            answer.accepted += outcome.accepted
            answer.close_calls += outcome.replayed > 0
            answer.replayed += outcome.replayed
    engine.release(request.id, tokens[:computed])
    answer.tokens = tokens[prompt:]
    return answer


def study(engine: Engine, method: str, prompts: int) -> Study:
    """Run random prompts with random sampling; each step drafts 0, 1, 3 or `LONGEST_DRAFT` tokens."""
    result = Study(OPENBLAS)
    for index in range(prompts):
        chance = random.Random(index)
        prompt = tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 40)))
        prompt = prompt[:5] * 5 if method == "ngram" else prompt
        request = Request(
            id=str(index), prompt_tokens=prompt, max_tokens=ANSWER_TOKENS, sampling=random_sampling(chance)
        )

        def drafts(chance: random.Random = chance) -> int:
            return chance.choice((0, 1, 3, LONGEST_DRAFT))

        plain = decode(engine, _under("coupled", request), method, lambda: 0)
        coupled = decode(engine, _under("coupled", request), method, drafts)
        strict = decode(engine, _under("strict", request), method, drafts)
        result.coupled_parted += coupled.tokens != plain.tokens
        result.strict_parted += strict.tokens != plain.tokens
        result.tokens += len(strict.tokens)
        result.accepted += strict.accepted
        result.close_calls += strict.close_calls
        result.replayed += strict.replayed
    return result


def _under(acceptance: str, request: Request) -> Request:
    wish = SpeculationRequest(acceptance=acceptance)
    return Request(
        id=f"{acceptance} {request.id}",
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        speculation=wish,
    )


def hesitant_engine(family: str, dtype: mx.Dtype) -> Engine:
    """Return an engine for a tiny twinned model and draft model. Windows wrap, and long rows get their own buffers."""
    target, draft = twinned(tiny_model(family)), twinned(related_draft(family))
    for model in (target, draft):
        model.set_dtype(dtype)
    return build(target, draft=draft, shared_tokens=40, chunk_tokens=48)


def main(arguments: Sequence[str]) -> None:
    family, dtype, method, prompts = arguments
    print(json.dumps(asdict(study(hesitant_engine(family, getattr(mx, dtype)), method, int(prompts)))))


if __name__ == "__main__":
    main(sys.argv[1:])
