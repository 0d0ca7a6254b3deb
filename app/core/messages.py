"""What crosses a process: frames between server and worker.

Frames are tagged msgpack structs, no pickle, no tensors.

Server → worker: commands. Worker → server: events. A request id comes back in every event about it; each choice of
a request (`n` > 1) is one `index`. Exactly one `Finished` per index, or one `Failed` for the whole request.
"""

from typing import Any

import msgspec

from app.core.errors import PacelineError, error_class
from app.core.host import Pressure
from app.core.reason import NO_REASON, Reason
from app.core.request import WHOLE, Grammar, Notice, Quantisation, SamplingParameters, SpeculationRequest
from app.core.statistics import Statistics

MAX_FRAME_BYTES = 64 * 1024 * 1024
MEASUREMENT = "measurement"
"""The owner of requests that only measure: hundreds of them, which the log tells in detail only when it is asked to."""
MAX_TEMPLATE_ARGUMENTS = 32
# fmt: off
SERVER_NAMES = frozenset({
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "conversations",
    "cycler", "dict", "documents", "eos_token", "joiner", "loop", "max_length", "messages", "namespace", "pad_token",
    "padding", "raise_exception", "range", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self",
    "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation", "unk_token",
})
# fmt: on
"""What the server or the template engine sets in a chat template; the arguments of a request must not."""


class DraftSpecification(msgspec.Struct, frozen=True):
    """One drafter of a unit. A multi-token head inside the main model's checkpoint has id and path of that model."""

    id: str
    path: str
    method: str = "draft_model"


NOT_THE_UNITS = frozenset(
    {"policy", "num_draft_tokens", "queue_limit", "draft_unavailable", "context_tokens", "longest_token_bytes"}
)
"""Of a specification: what an open engine does not depend on; whatever is not named here is the unit's."""


class ModelSpecification(msgspec.Struct, frozen=True, kw_only=True):
    """A main model and its drafters: loaded, leased and unloaded as one unit. Paths are local folders."""

    id: str
    path: str
    drafts: tuple[DraftSpecification, ...] = ()
    """At most one for each method, the best first."""
    draft_unavailable: str = ""
    """Why a drafter that was chosen is not used; empty when there is none to explain."""
    policy: str = "auto"
    acceptance: str = "coupled"
    """`coupled`: what equals the target's own draw; `strict`: close calls as plain; `rejection`: by min(1, p/q)."""
    methods: tuple[str, ...] = ()
    """The methods that may run; empty: every one that can."""
    num_draft_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    """How many of the last tokens an earlier place must repeat for n-gram drafts, at least and at most."""
    ngram_across_requests: bool = False
    """Whether n-grams are looked up in earlier requests of the same owner too."""
    max_rows: int = 8
    prefill_chunk_tokens: int = 2048
    max_context_tokens: int | None = None
    quantisation: Quantisation = WHOLE
    context_tokens: int = 0
    longest_token_bytes: int = 0
    """What its files say, for a first look at the length of a prompt; 0: nobody knows."""
    prefix_cache_bytes: int | None = None
    """Of former prompts in memory; None: a share of what the models leave."""
    queue_limit: int = 128

    def same_unit(self, other: "ModelSpecification") -> bool:
        """Whether an engine opened for one serves the other: only what the scheduler or the server reads may differ."""
        names = set(self.__struct_fields__) - NOT_THE_UNITS
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def no_drafter(self) -> Reason:
        """Why no drafter came with the model, if there is a text that says so."""
        return Reason("drafters", {"detail": self.draft_unavailable}) if self.draft_unavailable else NO_REASON


# --- commands -------------------------------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate from chat messages, from text, or from token ids: exactly one of the three is set."""

    id: str
    owner: str = ""
    """Whose request it is: a name that differs for people who must not learn of one another."""
    model: ModelSpecification
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    suffix: str | None = None
    """Of a text: what the answer leads to; it fills in the middle."""
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    """`auto`, `required` (some call), or `function:NAME` (a call of that tool); enforced by grammar."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    continues: bool = False
    """The answer goes on with the last message, which is the assistant's."""
    grammar: Grammar | None = None
    """What the text of the answer, behind its reasoning, must match."""
    reasoning_tokens: int | None = None
    """After so many tokens of reasoning the block is closed; None: the model decides."""
    template_arguments: dict[str, Any] = {}
    max_tokens: int | None = None
    """None: up to the end of the context."""
    stop: tuple[str, ...] = ()
    n: int = 1
    echo: bool = False
    embeds: str = ""
    """`mean`, `last` or `cls`: an embedding of the prompt is wanted in place of an answer."""
    leaves: bool = False
    """The model leaves memory after this answer."""
    ignore_end: bool = False
    """Go on behind the end that the model writes, up to `max_tokens`: what is measured should be of one length."""
    sampling: SamplingParameters = SamplingParameters()
    speculation: SpeculationRequest = SpeculationRequest()
    notices: tuple[Notice, ...] = ()
    """Fields of the request that cannot be honoured; its answer repeats them as `warnings`."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str


class LoadModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `ModelLoaded` or `Failed` with this id, after `LoadProgress` events."""

    id: str
    model: ModelSpecification


class KeepModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How long a model stays, whether it is loaded now or later. Loads nothing, is not answered; None: as it was."""

    model_id: str
    pinned: bool | None = None
    idle_seconds: float | None = None
    """Without a request until it is unloaded; negative: never."""


class UnloadModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    model_id: str


class ClearPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget every earlier prompt, in memory and on disk. Not answered."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Finish running requests for at most `drain_seconds`, then exit 0."""

    drain_seconds: float = 0.0


class ReadPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the prompt of a request and generate nothing; answered by `PromptTold` or `Failed`. Loads no model."""

    id: str
    prompt: Generate


Command = ReadPrompt | Generate | Cancel | LoadModel | KeepModel | UnloadModel | ClearPrefixes | Shutdown


# --- events ---------------------------------------------------------------------------------------------------


class TokenText(msgspec.Struct, frozen=True, kw_only=True):
    """One token as the client sees it in `logprobs`."""

    token: str
    token_bytes: tuple[int, ...] = ()
    logprob: float | None = 0.0
    """None: of the first token of a prompt, which nothing stands before."""
    top: tuple[tuple[str, float, tuple[int, ...]], ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """More of one tool call of a choice; the first piece of each names it."""

    index: int
    """Which call of the choice, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """More of its JSON text; all pieces together are one object."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    process_id: int
    device: str
    versions: dict[str, str] = {}
    memory_ceiling_bytes: int = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent at least once a second, and a few times a second while it steps; `pending`: work is waiting for a step."""

    pending: bool
    step_seconds: tuple[float, ...] = ()
    """Of each step since the last one."""
    snapshot: "Snapshot | None" = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt was rendered and tokenized and the request is queued: from here on streaming may begin."""

    id: str
    prompt_tokens: int


class Delta(msgspec.Struct, kw_only=True, tag=True):
    """Text of one step, or of a few; it grows until it is told. `accepted_spans`: characters of `text` that came from
    the drafter, (start, end).

    The counts are those since the choice's previous one; over all of them they add up to its `Statistics`.
    """

    id: str
    index: int
    text: str
    tokens: int
    drafted: int = 0
    accepted: int = 0
    accepted_spans: tuple[tuple[int, int], ...] = ()
    method: str = "off"
    why_not_drafted: Reason | None = None
    """Why its steps draft nothing, or no reason since they do; None: as told before, and at first no reason."""
    logprobs: tuple[TokenText, ...] = ()
    reasoning: str = ""
    """What the model thinks before it answers; no part of `text`."""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The one terminal event of a choice. `finish_reason` is OpenAI's stop, length or tool_calls, or cancelled."""

    id: str
    index: int
    finish_reason: str
    usage: Statistics
    stop: str = ""
    """The stop string that ended it."""
    unfinished_call: int | None = None
    """The `ToolCallDelta.index` of a call whose arguments were cut off, always the last; None: every call is whole."""
    embedding: tuple[float, ...] = ()
    """Of the prompt, of length 1, where that was wanted."""
    notices: tuple[Notice, ...] = ()
    """Repairs that its prompt needed, and fields of the request that could not be honoured."""


class PromptTold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What `ReadPrompt` asked for: the tokens, and their text."""

    id: str
    tokens: list[int]
    text: str
    notices: tuple[Notice, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The one terminal event of a request that failed; `error` names a class of `core.errors`."""

    id: str
    error: str
    message: str
    code: str
    parameter: str | None = None
    retry_after_seconds: int | None = None


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    model_id: str
    phase: str
    fraction: float


class ModelLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    model_id: str
    seconds: float


class ModelUnloaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    model_id: str


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """State of one model in the pool, as `ps`, `/v1/models` and `/metrics` show it."""

    id: str
    state: str
    """loading, ready or unloading."""
    drafts: tuple[DraftSpecification, ...] = ()
    weights_bytes: int = 0
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
    prefix_disk_bytes: int = 0
    prefix_found_tokens: dict[str, int] = {}
    """Tokens of prompts that were not read again since it was loaded, by where they were: `memory` or `disk`."""
    prefix_trouble: str = ""
    """Why nothing is kept on disk for the moment."""
    cache_families: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    unavailable: dict[str, Reason] = {}
    longest_drafts: dict[str, int] = {}
    """Method -> the most drafts that it ever proposes; others know no such limit."""
    max_context_tokens: int = 0
    running: int = 0
    waiting: int = 0
    reading: dict[str, int] = {}
    """Choices (`request id#index`) whose prompt is being read -> how many of its tokens are in the cache."""
    pinned: bool = False
    idle_seconds: float = 0.0
    leases: int = 0

    @property
    def draft_ids(self) -> tuple[str, ...]:
        """The ids of its drafters."""
        return tuple(draft.id for draft in self.drafts)

    @property
    def unavailable_words(self) -> dict[str, str]:
        """Method -> why it cannot run, in words for programs."""
        return {method: str(why) for method, why in self.unavailable.items()}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's state, sent with a heartbeat about once a second while anything changes."""

    models: tuple[LoadedModel, ...] = ()
    active_bytes: int = 0
    cached_bytes: int = 0
    peak_bytes: int = 0
    memory_pressure: Pressure = "normal"
    """How short of memory the whole computer is."""


class TextWork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Seconds that the text side was busy since it last told: load, render, tokenize, stopped (in vain), stream."""

    seconds: dict[str, float]


Event = (
    TextWork
    | Ready
    | Heartbeat
    | Accepted
    | Delta
    | Finished
    | PromptTold
    | Failed
    | LoadProgress
    | ModelLoaded
    | ModelUnloaded
)


# --- between the worker and the process that reads a model's prompts ---------------------------------------------


class PromptRead(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, or the error that its sender is told."""

    tokens: list[int] = []
    checkpoints: tuple[int, ...] = ()
    """Places in it, rising, where later prompts will probably part from it."""
    grammar: str = ""
    """What the answer is held to: llguidance's grammar, as JSON; empty: nothing."""
    error: Failed | None = None
    seconds: dict[str, float] = {}
    """What it took, by stage, and the load when it is the first."""
    notices: tuple[Notice, ...] = ()
    """Repairs that the template needed."""


# --- an error as a frame and back: the class by its name, nothing of the traceback ----------------------------

_LONGEST_MESSAGE = 600


def failed_frame(request_id: str, error: PacelineError) -> Failed:
    """The terminal frame of a request that ended with `error`."""
    return Failed(
        id=request_id,
        error=type(error).__name__,
        message=_encodable(error.message),
        code=error.code,
        parameter=error.parameter,
        retry_after_seconds=error.retry_after_seconds,
    )


def error_of(failed: Failed) -> PacelineError:
    """The error that a frame names."""
    return error_class(failed.error)(
        failed.message,
        code=failed.code,
        parameter=failed.parameter,
        retry_after_seconds=failed.retry_after_seconds,
    )


def short_text(error: BaseException) -> str:
    """One line about an unexpected exception; the traceback belongs into the log."""
    first_line = next(iter(str(error).splitlines()), "")
    return _encodable(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)


def _encodable(text: str) -> str:
    return text[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode("utf-8")
