"""Requests and their records: frozen values that cross every boundary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

OFF, AUTO = "off", "auto"
"""Methods besides the drafters' names: plain decoding, and the method that is expected to be fastest."""

DraftingPolicy = Literal["auto", "single", "off"]
"""Policy of a unit: draft whenever that is faster, only while one request runs, or never."""

AcceptanceRule = Literal["coupled", "strict", "rejection"]
"""Rule for drafts: `coupled` accepts a token that the target also draws, `strict` redoes close calls by plain
decoding, `rejection` accepts with probability min(1, p/q)."""

MAX_DRAFT_TOKENS = 64
"""Limit on the draft tokens per step that a request or a setting may ask for."""


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters for drawing the next token from the target's logits.

    Order: logit bias and penalties, temperature, then top-k, top-p, min-p. `temperature` 0 is argmax.
    `seed` keys the noise together with the output position, so the same seed gives the same text.
    """

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    top_logprobs: int | None = None
    """Log probabilities to return. None: none; 0: of the chosen token only; k: also of the k likeliest tokens."""


class SpeculationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requested speculation. `auto` may fall back, with a reason; the request fails if a named method cannot run."""

    method: str = AUTO
    num_draft_tokens: int | None = None
    """Number of draft tokens per step: exact if a method is named; with `auto`, the maximum."""
    methods: tuple[str, ...] = ()
    """Methods of the drafters named in the request, which fails unless all of them can run; empty: all may draft."""
    policy: DraftingPolicy | Literal[""] = ""
    """Policy in place of the loaded unit's, which a concurrent measurement may have set; empty: the unit's."""
    acceptance: Literal["coupled", "strict", ""] = ""
    """Rule in place of the loaded unit's; empty: the unit's."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that the text of an answer must match. `kind` is json_object, json_schema, regex, choice or lark."""

    kind: str
    text: str = ""
    """The schema or the choices as JSON, the expression, or the grammar."""
    parameter: str = "response_format"
    """Name of the request's parameter that contains the grammar."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Markers around a model's reasoning before its answer."""

    opening: str
    closing: str
    inside: bool = False
    """Whether the prompt ends inside the reasoning, so that the output continues it."""
    most_tokens: int | None = None
    """Number of reasoning tokens after which the reasoning is closed; None: the model decides."""
    call_names: tuple[str, ...] = ()
    """Names of functions that may be called in gpt-oss's own format, which ends the answer inside the reasoning."""


class Constraint(Protocol):
    """Constraint on one request's output. It tracks the output itself; callers always pass the whole output."""

    def begin(self) -> "Constraint":
        """Return a new, equal constraint at the beginning of an output."""

    def binds(self, output: Sequence[int], slots: int) -> bool:
        """Return whether it may forbid one of the next `slots` tokens."""

    def forced(self, output: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the known forced continuation: for each position the usual token, then the alternatives, because
        different tokens can spell the same text."""

    def forced_after(self, output: Sequence[int], drafts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return how many of `drafts` are allowed, and the usual tokens of the text that must follow these."""

    @property
    def affordable_drafts(self) -> int:
        """Maximum number of drafts in a step, judged by the time that masks have taken."""

    def failure(self, output: Sequence[int]) -> str:
        """Return an error if no token can follow `output`, or if it must not end here; otherwise an empty string."""

    def openings(self, output: Sequence[int]) -> Sequence[int]:
        """Return the tokens that may open reasoning next. One of them follows if it is drawn without a mask."""

    def allow(self, output: Sequence[int], drafts: Sequence[int], masks: Any) -> int:
        """Write the masks of what may follow `output` and each draft after it; return how many of `drafts` are allowed.

        `masks` is a numpy int32 array [1 + drafts, words] with one bit per token, all set on entry. Slots after a
        draft that is not allowed stay unchanged.
        """


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A repair that a request needed, or a part of it that cannot be honoured; listed in the response's `warnings`."""

    code: str
    """The kind, for programs and for the log, which records each kind once."""
    message: str
    parameter: str = ""
    """The field of the request that it concerns."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as the scheduler and the engine see it."""

    id: str
    owner: str = ""
    """Client identity: only earlier requests of the same owner may supply its n-gram drafts and cached prefix."""
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParameters = SamplingParameters()
    speculation: SpeculationRequest = SpeculationRequest()
    constraint: Constraint | None = None
    """Constraint on its output; None: unconstrained."""
    embeds: str = ""
    """`mean`, `last` or `cls`: return the prompt's hidden states, pooled that way, instead of an answer."""
    checkpoints: tuple[int, ...] = ()
    """Positions in the prompt, ascending, where later prompts will probably diverge from it."""
    scores_prompt: bool = False
    """Whether to return log probabilities of the prompt's tokens too, with `sampling.top_logprobs` alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A finished generation request, as the server remembers it.

    `figures` maps names of the API to numbers; the texts are None unless the server keeps them.
    """

    id: str
    endpoint: str
    model_id: str
    key_name: str
    created_at: float
    """Unix seconds."""
    outcome: str
    """`stop`, `length`, `tool_calls`, `cancelled`, or the code of an error."""
    figures: dict[str, Any]
    prompt: str | None = None
    reply: str | None = None


class Quantisation(msgspec.Struct, frozen=True):
    """Quantisation of the KV cache in layers that keep every token: `bits` per number (0: none), for rows whose prompt
    has `from_tokens` or more. A row is quantised from its first token or never, so drafts cannot change its output."""

    bits: int = 0
    from_tokens: int = 0

    def bits_of(self, prompt_tokens: int) -> int:
        """Return the bits per number for a row with `prompt_tokens` prompt tokens."""
        return self.bits if prompt_tokens >= self.from_tokens else 0


UNQUANTISED = Quantisation()
