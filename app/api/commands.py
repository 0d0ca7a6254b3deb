"""From a checked body to the worker's command: sampling, speculation, and what stands in for absent fields."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from app.api.schemas import NO_LIMIT, GenerationBody
from app.core.drafters import DRAFT_METHODS, OFF
from app.core.errors import InvalidRequest
from app.core.messages import ModelSpecification
from app.core.request import SamplingParameters, SpeculationRequest
from app.model_settings import ModelSettings
from app.serving.context import Context
from app.serving.resolver import Resolver

DEFAULT_TEMPERATURE = 1.0
SEED_BITS = 53
"""Drawn seeds are exact in JSON readers that keep numbers as doubles, so a client can send them back."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the commands of one HTTP request share. `seed` is the client's, or the drawn one."""

    model: ModelSpecification
    usual: ModelSettings
    """What is set for the model; a request's own values go before it."""
    sampling: SamplingParameters
    speculation: SpeculationRequest
    seed: int


async def plan(context: Context, body: GenerationBody, *, top_logprobs: int | None) -> Plan:
    """Decide model, drafters, sampling and speculation. Raises what `Resolver.resolve` raises."""
    context.activity.check_open()
    model, speculation = await asyncio.to_thread(_resolve, context.resolver, body)
    seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
    usual = context.live.model(model.id)
    return Plan(model, usual, sampling_parameters(body, usual, seed, top_logprobs), speculation, seed)


def _resolve(resolver: Resolver, body: GenerationBody) -> tuple[ModelSpecification, SpeculationRequest]:
    """The unit, and what was asked of speculation; reads the disk."""
    wish = speculation_request(body)
    drafts = None if body.draft_model == OFF else body.draft_model or None
    model = resolver.resolve(body.model, drafts, method=wish.method)
    wish = msgspec.structs.replace(wish, methods=resolver.named_methods(model, drafts))
    return model, resolver.as_own(model.id, wish)


def sampling_parameters(
    body: GenerationBody, usual: ModelSettings, seed: int, top_logprobs: int | None
) -> SamplingParameters:
    """The sampling of a request; negative seeds count from 2^64, `top_k` -1 is off as in vLLM, `top_p` 0 is greedy."""
    neutral = SamplingParameters(temperature=DEFAULT_TEMPERATURE)

    def value(name: str) -> Any:
        """What the request says, else what is set for the model, else what changes nothing."""
        asked = getattr(body, name)
        return _or(asked if asked is not None else getattr(usual, name), getattr(neutral, name))

    top_p = value("top_p")
    return SamplingParameters(
        seed=seed % (1 << 64),
        temperature=value("temperature") if top_p else 0.0,
        top_p=top_p or neutral.top_p,
        top_k=max(value("top_k"), 0),
        min_p=value("min_p"),
        repetition_penalty=value("repetition_penalty"),
        presence_penalty=value("presence_penalty"),
        frequency_penalty=value("frequency_penalty"),
        logit_bias={int(key): value for key, value in (body.logit_bias or {}).items()},
        top_logprobs=top_logprobs,
    )


def max_tokens(asked: int | None, usual: int | None) -> int | None:
    """How long the answer may get; None: up to the end of the context."""
    return None if asked == NO_LIMIT else usual if asked is None else asked


def speculation_request(body: GenerationBody) -> SpeculationRequest:
    """What was asked of speculation; an empty `draft_model` is `off`, and that alone turns speculation off."""
    options = body.speculation
    method = options.method if options else None
    num_draft_tokens = options.num_draft_tokens if options else None
    draft = OFF if body.draft_model == "" else body.draft_model
    if draft == OFF and method in DRAFT_METHODS:
        message = f"draft_model is off, but speculation.method asks for {method}."
        raise InvalidRequest(message, parameter="draft_model")
    if method in {None, "auto"}:
        method = OFF if draft == OFF else "auto"
    return SpeculationRequest(
        method=method or "auto",
        num_draft_tokens=num_draft_tokens or body.num_draft_tokens,
    )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
