"""Repairs of a conversation that a chat template refuses or shows only in part: pure functions, in order.

`required_repairs` chooses the repairs that all conversations with a template need; `app.text.prompt.ladder` tries those
of `LADDER` in order, until the template needs no more. No repair loses a text, except reasoning. Only tool results
that arrive late change earlier turns; otherwise, cached prefixes of earlier prompts still match.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from app.text.dialect import Dialect
from app.text.prompt import history_calls, turns
from app.text.prompt.turns import SYSTEM, Conversation, each_message

REFUSED, CALLS_MISSING, NULLS_WRITTEN = "refused", "calls missing", "nulls written"
"""Flaws of a prompt, besides roles whose texts are missing: it was refused, lacks calls, or shows nulls as "None"."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Change that adapts a conversation to a template."""

    apply: Callable[[Conversation], Conversation]
    code: str = ""
    """Code of the notice; empty for a repair that only changes the spelling, which needs none."""
    message: str = ""
    fixes: frozenset[str] = frozenset({REFUSED})
    """Flaws that it may fix, and roles whose missing texts it may restore."""
    parameter: str = "messages"
    """Field of the request that it changes."""


def apply_repairs(conversation: Conversation, repairs: tuple[Repair, ...]) -> Conversation:
    """Apply all of `repairs` in their order."""
    for repair in repairs:
        conversation = repair.apply(conversation)
    return conversation


_SYSTEMS = frozenset({REFUSED, *SYSTEM})
_RESULTS = frozenset({REFUSED, "tool"})

_DEVELOPERS = Repair(each_message(turns.developer_as_system), fixes=_SYSTEMS)
_SPLIT = Repair(
    history_calls.calls_split,
    "tool_calls_split",
    "Parallel calls were split into single ones, each followed by its result: this model's chat template takes one "
    "call at a time.",
)
_APART = Repair(
    history_calls.texts_apart,
    "text_before_calls",
    "Text beside tool calls was moved to a message of its own: this model's chat template accepts only one of the two.",
)
_WORDS = "Tool calls and results were written as text: this model's chat template does not support them."
_NUMBERED = "Ids of tool calls were replaced by function and number, the form that this model's chat template expects."
_TOOLS = "The tools were described in the system message: this model's chat template does not show tools."


class TemplateProbe(Protocol):
    """Probe of which parts of a conversation a template shows."""

    def shows_tools(self) -> bool:
        """Return whether tools appear in the template's prompts."""

    def shows_calls(self, content: str | None, number: int) -> bool:
        """Return whether `number` parallel calls appear in the prompts next to `content`."""

    def numbers_calls(self) -> bool:
        """Return whether call ids must consist of function and number, for results to match or the name to appear."""


def required_repairs(source: str, dialect: Dialect, probe: TemplateProbe) -> tuple[Repair, ...]:
    """Choose the repairs that every conversation needs for a template with this source and dialect."""
    repairs = [Repair(history_calls.results_ordered)]
    if "developer" not in source:
        repairs.append(_DEVELOPERS)
    shows_with_empty_content = probe.shows_calls("", 1)
    if not shows_with_empty_content and not probe.shows_calls(None, 1):
        calls_repair = (
            partial(history_calls.calls_as_text, dialect=dialect)
            if dialect.parser
            else history_calls.calls_and_results_as_text
        )
        repairs.append(Repair(each_message(calls_repair), "tool_calls_in_words", _WORDS))
    else:
        repairs += [] if probe.shows_calls("" if shows_with_empty_content else None, 2) else [_SPLIT]
        repairs += [] if probe.shows_calls("a", 1) else [_APART]
        repairs += [] if shows_with_empty_content else [Repair(each_message(turns.empty_to_null))]
    if probe.numbers_calls():
        repairs.append(Repair(history_calls.numbered_identifiers, "tool_call_ids_fitted", _NUMBERED))
    if not dialect.parser or not probe.shows_tools():
        instructions = "" if dialect.parser else history_calls.CALL_INSTRUCTIONS
        repairs.append(
            Repair(
                partial(history_calls.tools_as_text, instructions=instructions),
                "tools_in_words",
                _TOOLS,
                parameter="tools",
            )
        )
    if "reasoning_content" not in source and (name := _reasoning_field(source)):
        message = f"The model's reasoning was sent as `{name}`, the field that its chat template reads."
        repairs.append(Repair(turns.with_reasoning_as(name), "thinking_renamed", message))
    return tuple(repairs)


def _reasoning_field(source: str) -> str | None:
    reads = re.compile(r"\bm(?:sg|essage)?(?:\.|\[['\"]|\.get\(['\"])(reasoning|thinking)\b")
    match = reads.search(source)
    return match.group(1) if match else None


LADDER = (
    Repair(each_message(turns.null_to_empty), fixes=frozenset({REFUSED, NULLS_WRITTEN})),
    _DEVELOPERS,
    Repair(
        turns.systems_joined,
        "system_messages_joined",
        "The system messages at the beginning were joined: this model's chat template accepts only one.",
        _SYSTEMS,
    ),
    Repair(
        turns.systems_moved,
        "system_messages_moved",
        "Later system messages were sent as user messages, in place: this model's chat template takes system messages "
        "only at the beginning.",
        _SYSTEMS,
    ),
    Repair(
        history_calls.each_call(history_calls.argument_mapping),
        "tool_arguments_repaired",
        "Call arguments that were not a JSON object were turned into one, unreadable ones as its field `raw`: this "
        "model's chat template reads their fields.",
    ),
    Repair(
        history_calls.short_identifiers,
        "tool_call_ids_fitted",
        "Call ids were replaced by ids of nine letters and digits: this model's chat template accepts no others.",
    ),
    Repair(
        history_calls.tools_described,
        "tool_description_added",
        "Tools without a description or parameters were given empty ones: this model's chat template needs them.",
        parameter="tools",
    ),
    Repair(
        history_calls.tools_detailed,
        "tool_parameters_detailed",
        "Parameters of tools without a description, or of several types, were written out: this model's chat template "
        "needs that.",
        parameter="tools",
    ),
    Repair(
        each_message(turns.without_reasoning),
        "thinking_left_out",
        "Reasoning before calls that come with text was left out: this model's chat template accepts only one of them.",
    ),
    Repair(
        history_calls.results_moved,
        "tool_results_moved",
        "Tool results were moved directly after their calls: this model's chat template takes them nowhere else.",
        _RESULTS,
    ),
    Repair(
        history_calls.results_added,
        "tool_results_added",
        f"Calls without a result got `{history_calls.NO_RESULT}`: this model's chat template needs one for each call.",
    ),
    Repair(
        turns.user_added,
        "user_turn_added",
        "An empty user message was put first: this model's chat template must begin with one.",
        frozenset({REFUSED, CALLS_MISSING}),
    ),
    Repair(
        history_calls.orphans_as_text,
        "tool_results_in_words",
        "Tool results without a call were sent as user messages: this model's chat template has no other place for "
        "them.",
        _RESULTS,
    ),
    Repair(
        turns.empty_left_out,
        "empty_messages_left_out",
        "Empty assistant messages were left out: this model's chat template refuses them.",
    ),
    Repair(
        turns.roles_joined,
        "roles_joined",
        "Consecutive messages of the same role were joined: this model's chat template requires alternating roles.",
    ),
    Repair(
        turns.results_joined,
        "results_joined",
        "A user message directly after a tool result was appended to the result: this model's chat template requires "
        "an assistant message in between.",
    ),
    Repair(
        turns.system_folded,
        "system_folded_into_user",
        "The system message was put into the first user message: this model's chat template takes no system message "
        "here.",
        _SYSTEMS,
    ),
    Repair(history_calls.tools_listed),
    Repair(history_calls.each_call(history_calls.argument_text)),
)
"""Repairs that are tried, in this order, for the flaws of a prompt; each is retained if it helps."""
