"""Requests and their records: frozen values that cross every boundary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

OFF, AUTO = "off", "auto"
"""Methods besides the drafters' names: plain decoding, and whichever method pays."""

DraftingPolicy = Literal["auto", "single", "off"]
"""Policy of a unit: draft whenever that is faster, only while one request runs, or never."""

AcceptanceRule = Literal["coupled", "strict", "rejection"]
"""Rule for drafts: `coupled` accepts what the target draws too, `strict` redoes close calls plainly, `rejection`
accepts by min(1, p/q)."""

MAX_DRAFT_TOKENS = 64
"""Limit on the draft tokens per step that a request or a setting may ask for."""


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters by which the next token is drawn from the target's logits.

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
    """None: no logprobs; 0: of the chosen token only; k: also of the k likeliest."""


class SpeculationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation as requested. `auto` may fall back and says why; a named method must run or be refused."""

    method: str = AUTO
    num_draft_tokens: int | None = None
    """Exact number where a method is named; with `auto`, the maximum."""
    methods: tuple[str, ...] = ()
    """Methods of the drafters that the request names, which must run or be refused too; empty: all may draft."""
    policy: DraftingPolicy | Literal[""] = ""
    """Replaces the loaded unit's, which a concurrent measurement may have chosen; empty: the unit's."""
    acceptance: Literal["coupled", "strict", ""] = ""
    """Replaces the loaded unit's; empty: the unit's."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that the text of an answer must match. `kind` is json_object, json_schema, regex, choice or lark."""

    kind: str
    text: str = ""
    """The schema or the choices as JSON, the expression, or the grammar."""
    parameter: str = "response_format"
    """Name of the request's parameter that holds it."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Markers around a model's reasoning before its answer."""

    opening: str
    closing: str
    inside: bool = False
    """Whether the prompt ends inside it, so that the output continues it."""
    most_tokens: int | None = None
    """Tokens after which it is closed; None: the model decides."""
    call_names: tuple[str, ...] = ()
    """Names of functions of which a call, in gpt-oss's words, may end the answer before it is closed."""


class Constraint(Protocol):
    """Constraint on one request's output. It keeps track of the output by itself; callers always pass all of it."""

    def begin(self) -> "Constraint":
        """Return another one at the beginning of an output."""

    def binds(self, output: Sequence[int], slots: int) -> bool:
        """Whether it may forbid one of the next `slots` tokens."""

    def forced(self, output: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the known forced continuation: for each position the usual token, then the alternatives, because the
        same text can be spelled in several ways."""

    def forced_after(self, output: Sequence[int], drafts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return how many of `drafts` are allowed, and the usual tokens of what must follow those."""

    @property
    def affordable_drafts(self) -> int:
        """Most drafts that a step may have, judged by the time that masks took."""

    def failure(self, output: Sequence[int]) -> str:
        """Return why nothing can follow `output`, or why it may not end like this; empty while all is well."""

    def opening(self, output: Sequence[int]) -> int | None:
        """Return a token that may also come next, but only where the model would draw it from all tokens."""

    def allow(self, output: Sequence[int], drafts: Sequence[int], masks: Any) -> int:
        """Write what may follow `output` and each draft after it; return how many of `drafts` are allowed.

        `masks` is an int32 array of numpy [1 + drafts, words], one bit for each token, all set. Slots after a draft
        that is not allowed are left as they are.
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
    """Identity behind it: only earlier requests of the same owner may supply its n-gram drafts and cached prefix."""
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
    """Whether to return log probabilities of the prompt's tokens too, as `sampling.top_logprobs` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A finished generation request, as the server remembers it.

    `figures` has its numbers, by the names of the API; the texts are None unless they are kept.
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
    """Quantisation of keys and values in layers that keep every token: `bits` of each number, 0: none, in the rows of
    prompts with `from_tokens` or more. A row is quantised from its first token or never, so drafts change nothing."""

    bits: int = 0
    from_tokens: int = 0

    def bits_of(self, prompt_tokens: int) -> int:
        """Return the bits for the row of such a prompt."""
        return self.bits if prompt_tokens >= self.from_tokens else 0


UNQUANTISED = Quantisation()
