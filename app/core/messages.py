"""Frames between server and worker: tagged msgpack structs, no pickle, no tensors.

Server → worker: commands. Worker → server: events. Every event about a request carries the request's id; `index` is
the number of a choice (`n` > 1). A request ends with one `Finished` per index, or one `Failed` for the whole request.
"""

from typing import Any, Literal, get_args

import msgspec

from app.core.errors import PacelineError, error_class
from app.core.reason import Reason
from app.core.request import OFF, Grammar, Notice, SamplingParameters, SpeculationRequest
from app.core.statistics import Statistics
from app.core.unit import DEFAULT_STAY, UNSPECIFIED_STAY, LoadedModel, ModelSpecification, Stay

Pressure = Literal["normal", "warning", "critical"]
"""Level of the system's memory pressure."""
PRESSURES: tuple[Pressure, ...] = get_args(Pressure)
"""All levels, mildest first."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
MEASUREMENT = "measurement"
"""Owner of measurement requests. There are hundreds of them, so their details are logged only at debug level."""
MAX_TEMPLATE_ARGUMENTS = 32
# fmt: off
RESERVED_TEMPLATE_NAMES = frozenset({
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "conversations",
    "cycler", "dict", "documents", "eos_token", "joiner", "loop", "max_length", "messages", "namespace", "pad_token",
    "padding", "raise_exception", "range", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self",
    "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation", "unk_token",
})
# fmt: on
"""Names that the server or the template engine sets in a chat template; requests must not set them as arguments."""


# --- commands -------------------------------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate from chat messages, from text, or from token ids: exactly one of the three is set."""

    id: str
    owner: str = ""
    """Identity of the client. Clients that must not learn anything about each other have different owners."""
    model: ModelSpecification
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    suffix: str | None = None
    """Text that follows the answer; the answer fills in the middle between `text` and `suffix`."""
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    """`auto`, `required` (some call), or `function:NAME` (a call of that tool); enforced by grammar."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    continues: bool = False
    """Whether the answer continues the last message, which is the assistant's."""
    grammar: Grammar | None = None
    """Grammar that the text of the answer, after its reasoning, must match."""
    reasoning_tokens: int | None = None
    """Number of reasoning tokens after which the reasoning is closed; None: the model decides."""
    template_arguments: dict[str, Any] = {}
    max_tokens: int | None = None
    """Maximum number of output tokens; None: up to the end of the context, 0: the prompt is only read, and kept."""
    stop: tuple[str, ...] = ()
    n: int = 1
    echo: bool = False
    embeds: str = ""
    """`mean`, `last` or `cls`: return an embedding of the prompt, pooled that way, instead of an answer."""
    stay: Stay = UNSPECIFIED_STAY
    """Time that the model stays in memory from now on; values that are None do not change."""
    ignore_end: bool = False
    """Continue past the model's end token, up to `max_tokens`, so that measured answers have the same length."""
    sampling: SamplingParameters = SamplingParameters()
    speculation: SpeculationRequest = SpeculationRequest()
    notices: tuple[Notice, ...] = ()
    """Fields of the request that cannot be honoured; the response lists them as `warnings`."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str


class LoadModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `ModelLoaded` or `Failed` with this id, after `LoadProgress` events."""

    id: str
    model: ModelSpecification
    stay: Stay = UNSPECIFIED_STAY


class KeepModels(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Replace all settings of how long models stay in memory; later requests may override them. Not answered."""

    usual: Stay = DEFAULT_STAY
    models: dict[str, Stay] = {}
    """Stays by model id, which take precedence over `usual`."""

    def of(self, model_id: str) -> Stay:
        """Return the stay of a model, with every value set."""
        return self.models.get(model_id, UNSPECIFIED_STAY).over(self.usual)


class UnloadModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    model_id: str


class ClearPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clear the prefix cache, in memory and on disk. Not answered."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Finish running requests for at most `drain_seconds`, then exit 0."""

    drain_seconds: float = 0.0


class ReadPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tokenize the prompt of a request and generate nothing; answered by `PromptTokens` or `Failed`. Loads no model."""

    id: str
    prompt: Generate


Command = ReadPrompt | Generate | Cancel | LoadModel | KeepModels | UnloadModel | ClearPrefixes | Shutdown


# --- events ---------------------------------------------------------------------------------------------------


class TokenText(msgspec.Struct, frozen=True, kw_only=True):
    """One token as the client sees it in `logprobs`."""

    token: str
    token_bytes: tuple[int, ...] = ()
    logprob: float | None = 0.0
    """Log probability (nat); None for the first token of a prompt, which has no token before it."""
    top: tuple[tuple[str, float, tuple[int, ...]], ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A delta of one tool call of a choice; the first delta of each call carries its id and name."""

    index: int
    """Index of the call within the choice, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """Next part of the call's JSON arguments; all parts together are one object."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    process_id: int
    device: str
    versions: dict[str, str] = {}
    memory_ceiling_bytes: int = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent at least once a second, and several times a second while steps run; `pending`: work waits for a step."""

    pending: bool
    step_seconds: tuple[float, ...] = ()
    """Duration of each step since the last heartbeat."""
    snapshot: "Snapshot | None" = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt was rendered and tokenized and the request is queued: streaming may begin."""

    id: str
    prompt_tokens: int


class Delta(msgspec.Struct, kw_only=True, tag=True):
    """Text of one or more steps: it grows until it is sent. `accepted_spans`: (start, end) of each run of characters of
    `text` that came from the drafter.

    The counts cover the steps since the choice's previous delta; over all deltas, they add up to its `Statistics`.
    """

    id: str
    index: int
    text: str
    tokens: int
    drafted: int = 0
    accepted: int = 0
    accepted_spans: tuple[tuple[int, int], ...] = ()
    method: str = OFF
    why_not_drafted: Reason | None = None
    """Reason why its steps draft nothing, `NO_REASON` if they draft; None: as before, at first `NO_REASON`."""
    logprobs: tuple[TokenText, ...] = ()
    reasoning: str = ""
    """Reasoning before the answer, not part of `text`."""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The one terminal event of a choice. `finish_reason` is OpenAI's stop, length or tool_calls, or cancelled."""

    id: str
    index: int
    finish_reason: str
    usage: Statistics
    stop: str = ""
    """Stop string that ended the answer; empty if none did."""
    unfinished_call: int | None = None
    """The `ToolCallDelta.index` of a call whose arguments were cut off, always the last; None: all are complete."""
    embedding: tuple[float, ...] = ()
    """Embedding of the prompt, normalised to length 1, if requested."""
    notices: tuple[Notice, ...] = ()
    """Repairs that the prompt needed, and fields of the request that could not be honoured."""


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `ReadPrompt`: the tokens, and their text."""

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
    values: dict[str, Any] = {}


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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's state, sent with a heartbeat about once a second while anything changes."""

    models: tuple[LoadedModel, ...] = ()
    active_bytes: int = 0
    cached_bytes: int = 0
    peak_bytes: int = 0
    text_bytes: int = 0
    """Memory of the processes that read prompts, with their tokenizers and templates."""
    memory_pressure: Pressure = "normal"
    """Memory pressure of the whole computer."""


class TextWork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Busy seconds of the text side since its last report: load, render, tokenize, stream, stopped (process failed)."""

    seconds: dict[str, float]


Event = (
    TextWork
    | Ready
    | Heartbeat
    | Accepted
    | Delta
    | Finished
    | PromptTokens
    | Failed
    | LoadProgress
    | ModelLoaded
    | ModelUnloaded
)


# --- between the worker and the process that reads a model's prompts ---------------------------------------------


class PromptRead(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, or the error for its client."""

    tokens: list[int] = []
    checkpoints: tuple[int, ...] = ()
    """Positions in the prompt, ascending, where later prompts will probably diverge from it."""
    grammar: str = ""
    """Grammar of the answer in llguidance's format, as JSON; empty: none."""
    error: Failed | None = None
    seconds: dict[str, float] = {}
    """Seconds by stage, including the load for the first prompt."""
    notices: tuple[Notice, ...] = ()
    """Repairs that the template needed."""


# --- errors to frames and back: the class by its name, without the traceback ----------------------------------

_MAX_MESSAGE_CHARACTERS = 600


def failed_frame(request_id: str, error: PacelineError) -> Failed:
    """Return the terminal frame of a request that ended with `error`."""
    return Failed(
        id=request_id,
        error=type(error).__name__,
        message=_encodable(error.message),
        code=error.code,
        parameter=error.parameter,
        retry_after_seconds=error.retry_after_seconds,
        values=dict(error.values),
    )


def error_of(failed: Failed) -> PacelineError:
    """Rebuild the error of a frame, as its class or, if that has its own constructor, the nearest base without one."""
    bases: Any = error_class(failed.error).__mro__
    made_alike: type[PacelineError] = next(base for base in bases if base.__init__ is PacelineError.__init__)
    return made_alike(
        failed.message,
        code=failed.code,
        parameter=failed.parameter,
        retry_after_seconds=failed.retry_after_seconds,
        values=failed.values,
    )


def short_text(error: BaseException) -> str:
    """Describe an unexpected exception in one line; the traceback belongs in the log."""
    first_line = next(iter(str(error).splitlines()), "")
    return _encodable(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)


def _encodable(text: str) -> str:
    return text[:_MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
