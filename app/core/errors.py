"""The single tree of errors. Each states what happened and the next action, and has an HTTP status. Refusals at the
HTTP level are `Rejected`, in `app/serving/errors.py`.

PacelineError
├── InvalidRequest            400  the client asked for something malformed or impossible
│   ├── SpeculationUnavailable     the request names a method that cannot run
│   ├── InvalidSetting        422  a setting is unknown, out of range or clashes with another one
│   └── StaleVersion          409  the value was changed elsewhere in the meantime: read it again
├── ModelNotFound             404
├── ModelInUse                409  requests use the model: wait for them or cancel them
├── QueueFull                 429  come back after `retry_after_seconds`
├── ModelUnavailable          503  the model cannot be loaded or is quarantined
│   ├── InsufficientMemory
│   └── DiskUnavailable            files cannot be read at present; the model may be sound
├── HubProblem                502  the hub of models: offline, gated, not found …; others in `HUB_STATUS`
├── StoreUnavailable          503  the file of settings and measurements cannot be used
├── WorkerGone                503  the worker process ended while the request ran
├── ServerRuns                     another server uses the same home folder; never sent to clients
└── CommandError                   a failed command, with the next action; never sent to clients
"""

from collections.abc import Mapping
from typing import Any

from app.core.download import problem_text
from app.core.setting_texts import size_text

HUB_STATUS = {"offline": 503, "busy": 503, "gated": 403, "not_found": 404, "refused": 403, "empty": 422, "unsafe": 422}
"""HTTP status by code of `PROBLEMS`; 502 for a code that is not listed."""

CONTEXT_OVERFLOW = "context_length_exceeded"


class PacelineError(Exception):
    """Base of all errors reported to a client: `message` is for people, `code` for programs."""

    status = 500
    kind = "server_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        parameter: str | None = None,
        retry_after_seconds: int | None = None,
        translation_key: str = "",
        values: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.parameter = parameter
        self.retry_after_seconds = retry_after_seconds
        self.translation_key = translation_key
        """Key of the dashboard's translation; empty: the dashboard shows `message`."""
        self.values = values or {}
        """Values that fill the translation, or another API format's wording of the error."""


class InvalidRequest(PacelineError):
    """The request is malformed, out of range or does not fit the model."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"


def context_overflow(prompt_tokens: int, context_tokens: int, size: str = "") -> InvalidRequest:
    """Return the error for a prompt too long for the context, in OpenAI's wording, which gateways and agents look for.
    `size` describes the prompt if `prompt_tokens` is only an estimate."""
    return InvalidRequest(
        f"This model's maximum context length is {context_tokens} tokens. However, your messages resulted in "
        f"{size or prompt_tokens} tokens, and one must stay free for the answer. "
        "Please reduce the length of the messages.",
        code=CONTEXT_OVERFLOW,
        values={"required_tokens": prompt_tokens + 1, "context_tokens": context_tokens},
    )


class SpeculationUnavailable(InvalidRequest):
    """The request names a method that cannot run here."""

    code = "speculation_unavailable"


class InvalidSetting(InvalidRequest):
    """A setting is unknown, has an unusable value, or clashes with another one."""

    status = 422
    code = "invalid_setting"


class StaleVersion(InvalidRequest):
    """A write carried an outdated version: read the present one, then write again."""

    status = 409
    code = "stale_version"


class ModelNotFound(PacelineError):
    """No model with that id is on disk."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class ModelInUse(PacelineError):
    """Requests are using the model, which cannot change until they end."""

    status = 409
    kind = "invalid_request_error"
    code = "model_in_use"


class QueueFull(PacelineError):
    """The bounded queue of the model is full; nothing was accepted."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class ModelUnavailable(PacelineError):
    """The model cannot serve: its folder is broken, it is quarantined, or its load was cancelled."""

    status = 503
    code = "model_unavailable"


class InsufficientMemory(ModelUnavailable):
    """The model does not fit under the memory ceiling, or not until another one is released."""

    code = "insufficient_memory"


class DiskUnavailable(ModelUnavailable):
    """Files cannot be read at present: too many are open, or the disk fails. The model itself may be sound."""

    code = "disk_unavailable"


class HubProblem(PacelineError):
    """A repository of the hub cannot be reached or used; `problem` is a code of `PROBLEMS`."""

    status = 502

    def __init__(self, problem: str, repository: str = "", detail: str = "") -> None:
        self.problem = f"{problem}: {detail}" if detail else problem
        text = problem_text(repository, self.problem)
        super().__init__(text[:1].upper() + text[1:], code=f"hub_{problem}")
        self.reason, self.repository = problem, repository
        self.status = HUB_STATUS.get(problem, 502)


class StoreUnavailable(PacelineError):
    """The file in which Paceline keeps settings and measurements is damaged, locked, or not Paceline's.

    `message` may go to any client and names no folder; `str()` is for the computer's owner and names the folder.
    """

    status = 503
    code = "store_unavailable"

    def __init__(self, message: str, *, private_message: str = "") -> None:
        super().__init__(message)
        self._private_message = private_message or message

    def __str__(self) -> str:
        return self._private_message


class WorkerGone(PacelineError):
    """The worker process ended while the request was running; the supervisor restarts it."""

    status = 503
    code = "worker_restarted"


class ServerRuns(PacelineError):
    """A server is already running with this home folder."""


class CommandError(PacelineError):
    """A command failed; the message is all that its user sees, and states the next action."""


PROBLEM_TEXTS = {
    "bool_parsing": "use on or off",
    "bool_type": "use on or off",
    "float_parsing": "use a number",
    "float_type": "use a number",
    "greater_than": "use more than {gt}",
    "greater_than_equal": "use {ge} or more",
    "int_from_float": "use a whole number",
    "int_parsing": "use a whole number",
    "int_type": "use a whole number",
    "less_than": "use less than {lt}",
    "less_than_equal": "use {le} or less",
    "literal_error": "use one of {expected}",
    "string_too_long": "use at most {max_length} characters",
    "string_too_short": "use at least {min_length} characters",
    "too_long": "use at most {max_length} entries",
}
"""Advice by type of pydantic error, as in the dashboard's `invalid.<type>`; other types keep pydantic's message."""


def translation_of(problem: Mapping[str, Any]) -> tuple[str, dict[str, object]]:
    """Return translation key and values for a pydantic error: the key is its type, or a field that has its own rule."""
    kind = str(problem["type"])
    is_field_rule = kind in {"value_error", "string_pattern_mismatch"} and problem["loc"]
    details: Mapping[str, object] = problem.get("ctx", {})
    values: dict[str, object] = {name: value for name, value in details.items() if isinstance(value, str | int)}
    values |= {name: f"{value:g}" for name, value in details.items() if isinstance(value, float)}  # 3600, not 3600.0
    if kind == "literal_error":
        values["expected"] = str(details["expected"]).replace(" or ", ", ")
    return str(problem["loc"][0]) if is_field_rule else kind, values


def invalid_setting(problem: Mapping[str, Any], prefix: str = "", *, is_size: bool = False) -> InvalidSetting:
    """Convert a pydantic error of a setting; `prefix` replaces the setting's name at the start of the message.
    `is_size`: limits are in bytes; the dashboard's text gets them in GB, the unit of its form field."""
    name = str(problem["loc"][0])[:60] if problem["loc"] else "settings"
    translation_key, values = translation_of(problem)
    limits = {key: value for key, value in values.items() if is_size and isinstance(value, int)}
    own_text = PROBLEM_TEXTS.get(str(problem["type"]), "")
    text = own_text.format_map({**values, **{key: size_text(limit) for key, limit in limits.items()}})
    return InvalidSetting(
        f"{prefix or name}: {text or str(problem['msg']).removeprefix('Value error, ')}",
        parameter=name,
        translation_key=translation_key,
        values={**values, **{key: limit / 10**9 for key, limit in limits.items()}},
    )


def _tree(root: type[PacelineError]) -> dict[str, type[PacelineError]]:
    errors = {root.__name__: root}
    for child in root.__subclasses__():
        errors.update(_tree(child))
    return errors


def error_class(name: str) -> type[PacelineError]:
    """Return the class that an error frame names; the root for an unknown name."""
    return _tree(PacelineError).get(name, PacelineError)
