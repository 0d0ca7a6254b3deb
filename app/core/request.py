"""What was asked, and what is remembered of it: frozen values that cross every boundary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn from the target's logits.

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
    """None: no logprobs; 0: of the chosen token only; k: and of the k likeliest."""


class SpeculationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked of speculation. `auto` may fall back and says why; a name must run or be refused."""

    method: str = "auto"
    num_draft_tokens: int | None = None
    """So many where a method is named; with `auto`, at most so many."""
    methods: tuple[str, ...] = ()
    """Those of the drafters that the request names, which must run or be refused too; empty: every one may draft."""
    policy: str = ""
    """In place of the loaded unit's, which another one's measurement may have chosen; empty: the unit's."""
    acceptance: str = ""
    """`coupled` or `strict`, in place of the loaded unit's; empty: the unit's."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must match. `kind` is json_object, json_schema, regex, choice or lark."""

    kind: str
    text: str = ""
    """The schema or the choices as JSON, the expression, or the grammar."""
    parameter: str = "response_format"
    """What the request calls it."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes what it thinks before it answers."""

    opening: str
    closing: str
    inside: bool = False
    """Whether the prompt ends inside it, so that the output goes on with it."""
    most_tokens: int | None = None
    """After so many it is closed; None: the model decides."""


class Constraint(Protocol):
    """What the output of one request is held to. It follows the output by itself; who asks shows it all of it."""

    def begin(self) -> "Constraint":
        """Another one at the beginning of an output."""

    def binds(self, output: Sequence[int], slots: int) -> bool:
        """Whether it may forbid one of the next `slots` tokens."""

    def forced(self, output: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """What must come next, as far as that is known: the usual token for each place, and then the others that may
        stand there, because the same text can be spelled in several ways."""

    def forced_behind(self, output: Sequence[int], drafts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """How many of `drafts` can stand, and the usual tokens of what must come behind these."""

    @property
    def affordable_drafts(self) -> int:
        """How many drafts a step may have, by the time that masks took."""

    def failure(self, output: Sequence[int]) -> str:
        """Why nothing can follow `output`, or why it may not end so; empty while all is well."""

    def opening(self, output: Sequence[int]) -> int | None:
        """The token that may come next besides, though only where the model would draw it from all tokens."""

    def allow(self, output: Sequence[int], drafts: Sequence[int], masks: Any) -> int:
        """Write what may follow `output` and each draft behind it; the answer is how many of `drafts` can stand.

        `masks` is an int32 array of numpy [1 + drafts, words], one bit for each token, all set. Slots behind a draft
        that cannot stand are left as they are.
        """


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A repair that a request needed, or a part of it that cannot be honoured; its response says so in `warnings`."""

    code: str
    """The kind, for programs and for the log, which has each kind once."""
    message: str
    parameter: str = ""
    """The field of the request that it is about."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as the scheduler and the engine see it."""

    id: str
    owner: str = ""
    """Whose request it is: only what the same owner said before may draft for it, or is found in the prefix cache."""
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParameters = SamplingParameters()
    speculation: SpeculationRequest = SpeculationRequest()
    constraint: Constraint | None = None
    """What its output is held to; None: nothing."""
    embeds: str = ""
    """`mean`, `last` or `cls`: the prompt's hidden states, pooled so, are wanted in place of an answer."""
    checkpoints: tuple[int, ...] = ()
    """Places in the prompt, rising, where later prompts will probably part from it."""
    scores_prompt: bool = False
    """Whether the log probabilities of the prompt's tokens are wanted too, as `sampling.top_logprobs` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A generation request that ended, as the server remembers it.

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
    """Of the keys and values in layers that keep every token: `bits` of each number, 0: none, in the rows of prompts
    with `from_tokens` or more. A row is or is not from its first token on, so that drafts change nothing."""

    bits: int = 0
    from_tokens: int = 0

    def bits_of(self, prompt_tokens: int) -> int:
        """Of the row of such a prompt."""
        return self.bits if prompt_tokens >= self.from_tokens else 0


WHOLE = Quantisation()
