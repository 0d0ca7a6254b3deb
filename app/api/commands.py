"""Fields that every generation request may carry, and the worker command built from them.

The bounds are part of the API; unknown fields are ignored, with a warning. Types are strict: no booleans or strings for
numbers, no NaN. `null` means absent everywhere.
"""

import asyncio
import re
import secrets
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import Request
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from app.api.ignored import ignored_fields, ignored_notice
from app.api.structured import GUIDED, format_grammar, structured_grammar
from app.core.errors import InvalidRequest, SpeculationUnavailable
from app.core.messages import Generate
from app.core.request import AUTO, OFF, Grammar, Notice, SamplingParameters, SpeculationRequest
from app.core.unit import UNSPECIFIED_STAY, ModelSpecification, Stay
from app.model_settings import ModelSettings
from app.models.drafters.methods import DRAFT_METHODS, METHOD_NAMES
from app.serving.auth import authorize_operator, identity_of
from app.serving.context import Context, context_of
from app.serving.errors import Rejected
from app.serving.gate import Body, DraftTokens

MAX_STOPS = 32
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIASES = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_MODEL_CHARACTERS = 300
MAX_TOP_LOGPROBS = 20
MAX_PAIRS, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512
"""Bounds of `metadata`, as in OpenAI's API: pairs, and characters of keys and of values."""
REQUEST_METHODS = (AUTO, OFF, *METHOD_NAMES)

NO_LIMIT = -1

ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=MAX_KEY_CHARACTERS)], Annotated[str, Field(max_length=MAX_VALUE_CHARACTERS)]],
    Field(max_length=MAX_PAIRS),
]


TEXT = {"type": "string", "minLength": 1}
STOP = TEXT | {"maxLength": MAX_STOP_CHARACTERS}


def object_of(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object that has all of `properties`."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def json_schema_as(*kinds: dict[str, Any], or_null: bool = True) -> WithJsonSchema:
    """Return the OpenAPI schema of a value that only its validator checks: one of `kinds`, or null if `or_null`."""
    return WithJsonSchema({"anyOf": [*kinds, *([{"type": "null"}] if or_null else [])]})


def _not_zero(tokens: int) -> int:
    if tokens == 0:
        raise ValueError(f"give at least 1, or {NO_LIMIT} for no limit")
    return tokens


MaxTokens = Annotated[int, Field(ge=NO_LIMIT, le=MAX_TOKEN_ID), AfterValidator(_not_zero)]


NUMBER = r"[0-9]+(\.[0-9]+)?"
DURATION = re.compile(rf"-?({NUMBER}|({NUMBER}(ms|s|m|h))+)")
DURATION_PART = re.compile(rf"({NUMBER})(ms|s|m|h|)")
UNIT_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_STAY_SECONDS = 31_536_000.0


def _stay_seconds(given: Any) -> Any:
    """Parse `5m`, `1h30m` or a number into seconds; anything below 0 means for ever."""
    if isinstance(given, str):
        if not DURATION.fullmatch(given):
            raise ValueError("give seconds, or a duration like 5m or 1h")
        size = sum(float(number) * UNIT_SECONDS[unit] for number, _, unit in DURATION_PART.findall(given))
        given = -size if given.startswith("-") else size
    return min(max(given, -1.0), MAX_STAY_SECONDS) if isinstance(given, int | float) else given


StaySeconds = Annotated[
    float | None,
    BeforeValidator(_stay_seconds),
    json_schema_as({"type": "number"}, {"type": "string", "pattern": f"^{DURATION.pattern}$"}),
]


class StayBody(Body):
    """Idle time after which the model is unloaded, in seconds or like `5m`: Ollama's `keep_alive`, LM Studio's `ttl`.
    0 unloads the model right after the answer, a negative value never. Unknown fields are ignored, with a warning."""

    model_config = ConfigDict(extra="allow")

    keep_alive: StaySeconds = None
    ttl: StaySeconds = None

    @property
    def stay_seconds(self) -> float | None:
        """Idle seconds until the model is unloaded; None: unchanged."""
        return self.ttl if self.keep_alive is None else self.keep_alive

    @property
    def stay_field(self) -> str:
        """Name of the field from which `stay_seconds` is taken."""
        return "ttl" if self.keep_alive is None else "keep_alive"


class StreamOptions(Body):
    """`include_usage`: one last chunk without choices carries the usage of the whole request."""

    include_usage: bool | None = None


class SpeculationOptions(Body):
    """Speculation options: `auto` may fall back and reports why; a method requested by name runs, or is refused."""

    model_config = ConfigDict(extra="forbid")

    method: str | None = Field(None, json_schema_extra={"enum": [*REQUEST_METHODS, None]})
    num_draft_tokens: DraftTokens | None = None
    acceptance: Literal["coupled", "strict"] | None = None

    @field_validator("method")
    @classmethod
    def _known(cls, method: str | None) -> str | None:
        if method is not None and method not in REQUEST_METHODS:
            raise ValueError(f"use one of {', '.join(REQUEST_METHODS)}")
        return method


class StructuredOutputs(Body):
    """Constraints on the text, as vLLM names them; at most one may be set."""

    model_config = ConfigDict(extra="forbid")

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(StayBody):
    """The fields that chat and completions share."""

    embeds: ClassVar[bool] = False
    """Whether the request asks for embeddings, and so may use an encoder."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    n: int | None = Field(None, ge=1, le=8)
    stop: Annotated[Any, json_schema_as(STOP, {"type": "array", "items": STOP, "maxItems": MAX_STOPS})] = ()
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: Annotated[int | None, AfterValidator(lambda seed: None if seed == -1 else seed)] = Field(
        None, ge=-(1 << 63), le=(1 << 64) - 1
    )
    """Seed of the draws; -1 is none, as in vLLM."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    response_format: Annotated[
        Any, json_schema_as(object_of(type={"enum": ["text", "json_object", "json_schema"]}))
    ] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculation: SpeculationOptions | None = None
    draft_model: ModelName | None = None
    num_draft_tokens: DraftTokens | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: Any) -> tuple[str, ...]:
        stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise ValueError(f"give a string or at most {MAX_STOPS} strings")
        if not all(isinstance(entry, str) and len(entry) <= MAX_STOP_CHARACTERS for entry in stops):
            raise ValueError(f"each stop must be a string of at most {MAX_STOP_CHARACTERS} characters")
        return tuple(filter(None, stops))

    @field_validator("logit_bias")
    @classmethod
    def _check_token_ids(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for key in biases or ():
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
                raise ValueError("keys are token ids")
        return biases

    @field_validator("response_format")
    @classmethod
    def _check_format(cls, response_format: Any) -> Grammar | None:
        return None if response_format is None else format_grammar(response_format)

    @model_validator(mode="after")
    def _check_grammars(self) -> "GenerationBody":
        if len(self._grammars()) > 1:
            raise ValueError("use only one constraint: response_format, or one structured output")
        return self

    def _grammars(self) -> list[Grammar]:
        """Return every grammar that the request asks for, under any field name."""
        options, grammars = self.structured_outputs, []
        constraints = (
            [] if options is None else [(kind, constraint, "structured_outputs") for kind, constraint in options]
        )
        constraints += [(kind, getattr(self, f"guided_{kind}"), f"guided_{kind}") for kind in GUIDED]
        grammars += [] if self.response_format is None else [self.response_format]
        return grammars + [
            structured_grammar(*constraint) for constraint in constraints if constraint[1] not in (None, False)
        ]

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that the answer must match; None: any text."""
        return next(iter(self._grammars()), None)

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self


DEFAULT_TEMPERATURE = 1.0
SEED_BITS = 53
"""Number of bits of a random seed: few enough to be exact in a double, so that any JSON client can send it back."""


async def shared_command(request: Request, body: GenerationBody, *, top_logprobs: int | None) -> Generate:
    """Build the part that all commands of one HTTP request share: model, drafters, sampling, speculation.

    Raises what `Resolver.resolve` raises.
    """
    context = context_of(request)
    context.activity.check_open()
    model, speculation = await asyncio.to_thread(_resolve, context, body)
    stay, notices = await allowed_stay(request, body)
    return Generate(
        id="",
        stay=stay,
        owner=identity_of(request).owner,
        model=model,
        stop=body.stop,
        n=body.n or 1,
        sampling=sampling_parameters(body, context.live.request_defaults(body.model, model.id), top_logprobs),
        speculation=speculation,
        grammar=body.grammar,
        notices=(*ignored_fields(body), *notices),
    )


async def allowed_stay(request: Request, body: StayBody) -> tuple[Stay, tuple[Notice, ...]]:
    """Return the requested stay, or a notice if the caller is not an operator: a stay affects every client."""
    if body.stay_seconds is None:
        return UNSPECIFIED_STAY, ()
    try:
        await authorize_operator(request)
    except Rejected:
        return UNSPECIFIED_STAY, (ignored_notice(body.stay_field, "it affects every client, so it needs an admin key"),)
    return Stay(idle_seconds=body.stay_seconds), ()


def _resolve(context: Context, body: GenerationBody) -> tuple[ModelSpecification, SpeculationRequest]:
    """Resolve the unit, and the speculation set by the request or by the profile that it names. Reads the disk."""
    resolver = context.resolver
    main = resolver.usable(body.model) if body.embeds else resolver.main(body.model)
    speculation = speculation_request(body, context.live.profile(body.model, main.id))
    drafts = None if body.draft_model == OFF else body.draft_model or None
    model = resolver.resolve(main.id, drafts, method=speculation.method)
    if speculation.acceptance and model.acceptance == "rejection":
        message = f"{main.id} uses acceptance by rejection, which a request cannot override."
        raise SpeculationUnavailable(message, parameter="speculation.acceptance")
    speculation = msgspec.structs.replace(
        speculation, methods=resolver.named_methods(model, drafts) or speculation.methods
    )
    return model, resolver.limit_speculation(model.id, speculation)


def sampling_parameters(body: GenerationBody, defaults: ModelSettings, top_logprobs: int | None) -> SamplingParameters:
    """Build the sampling parameters: seeds are taken modulo 2^64, `top_k` -1 is off as in vLLM, `top_p` 0 is greedy."""
    neutral = SamplingParameters(temperature=DEFAULT_TEMPERATURE)

    def value(name: str) -> Any:
        """Return the request's value, else the model's setting, else the neutral value."""
        candidates = (getattr(source, name) for source in (body, defaults, neutral))
        return next(candidate for candidate in candidates if candidate is not None)

    top_p = value("top_p")
    return SamplingParameters(
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed % (1 << 64),
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


def max_tokens(requested: int | None, default: int | None) -> int | None:
    """Return the limit on the answer, in tokens; None: up to the end of the context."""
    return None if requested == NO_LIMIT else default if requested is None else requested


def speculation_request(body: GenerationBody, profile: ModelSettings) -> SpeculationRequest:
    """Build the speculation request. An empty `draft_model` means `off`: no speculation unless a method is named.

    The profile supplies what the request leaves out: methods, policy and draft length.
    """
    options = body.speculation or SpeculationOptions()
    method, draft = options.method, OFF if body.draft_model == "" else body.draft_model
    if draft == OFF and method in DRAFT_METHODS:
        message = f"draft_model is off, but speculation.method asks for {method}."
        raise InvalidRequest(message, parameter="draft_model")
    if method is None and draft is None:
        request = _from_profile(profile)
    elif method in {None, "auto"}:
        request = SpeculationRequest(method=OFF if draft == OFF else "auto")
    else:
        request = SpeculationRequest(method=method)
    return msgspec.structs.replace(
        request,
        num_draft_tokens=options.num_draft_tokens or body.num_draft_tokens or profile.num_draft_tokens,
        acceptance=options.acceptance or "",
    )


def _from_profile(profile: ModelSettings) -> SpeculationRequest:
    methods = profile.methods or ()
    return SpeculationRequest(
        method=OFF if profile.policy == OFF else methods[0] if len(methods) == 1 else "auto",
        methods=methods if len(methods) > 1 else (),
        policy="" if profile.policy is None or profile.policy == "off" else profile.policy,
    )
