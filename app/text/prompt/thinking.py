"""Translates a client's thinking settings into a template's arguments; unsupported settings become notices.

A template switches thinking by a variable with one of several names, or takes an effort, of which it supports a few.
An argument that it does not read would silently change nothing in the prompt.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.core.request import Notice

ENABLED, EFFORT, BUDGET = "enable_thinking", "reasoning_effort", "thinking_budget"
"""Names of the arguments in which the server passes a client's thinking settings."""
SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_option": ("on", "off"),
    "reasoning": (True, False),
}
"""Variables that switch thinking in templates, each with its values for on and off."""
EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
USUAL_EFFORTS = frozenset({"low", "medium", "high"})
"""Efforts assumed for a template that names fewer than two."""
NO_THINKING = "no_think"
"""Name in some templates for the effort `none`."""
QUOTED = re.compile(rf"""["']({"|".join(EFFORTS)}|{NO_THINKING})["']""")
GENERATION_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """Variables and reasoning efforts that a template reads."""

    names: frozenset[str]
    efforts: tuple[str, ...]
    """Efforts that the template supports, in ascending order."""
    none: str = "none"
    """Name in the template for the effort `none`."""

    @property
    def switches(self) -> list[str]:
        """Variables that switch thinking in this template."""
        return [name for name in SWITCHES if name in self.names]

    @property
    def effort_name(self) -> str | None:
        """Name of its effort argument; None if it takes no effort."""
        return next((name for name in EFFORT_NAMES if name in self.names), None)


def template_variables(source: str) -> TemplateVariables | None:
    """Find the variables and efforts that a template reads; None if it cannot be compiled."""
    environment = ImmutableSandboxedEnvironment(extensions=[LoopControlExtension])
    try:
        names = meta.find_undeclared_variables(environment.parse(GENERATION_TAGS.sub("", source)))
    except (TemplateError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    quoted = set(QUOTED.findall(source))
    none = NO_THINKING if NO_THINKING in quoted else EFFORTS[0]
    supported = {EFFORTS[0] if word == NO_THINKING else word for word in quoted}
    if len(supported - {EFFORTS[0]}) < 2:
        supported |= USUAL_EFFORTS
    return TemplateVariables(frozenset(names), tuple(effort for effort in EFFORTS if effort in supported), none)


def translate_arguments(
    arguments: Mapping[str, Any], variables: TemplateVariables, *, has_reasoning: bool
) -> tuple[dict[str, Any], tuple[Notice, ...]]:
    """Translate arguments for a template, with notices of those that cannot be honoured.

    `has_reasoning`: the model writes its reasoning separately from its answer.
    """
    enabled, effort = arguments.get(ENABLED, arguments.get("thinking")), arguments.get(EFFORT)
    translated = {name: value for name, value in arguments.items() if name not in (ENABLED, EFFORT, BUDGET)}
    unsupported = sorted(name for name in translated if name not in variables.names and name not in SWITCHES)
    notices = [_unsupported_argument(name) for name in unsupported]
    if isinstance(enabled, bool):
        translated |= {
            name: SWITCHES[name][0 if enabled else 1] for name in variables.switches if name not in translated
        }
    elif ENABLED in arguments:
        translated[ENABLED] = enabled
    if BUDGET in variables.names and (BUDGET in arguments or enabled is False):
        translated[BUDGET] = 0 if enabled is False else arguments[BUDGET]
    has_switch = bool(variables.switches) or BUDGET in variables.names
    if enabled is False and not has_switch:
        effort = EFFORTS[0]
    if enabled is False and has_switch:
        effort = None
    if enabled is True and effort is None and not (has_switch or variables.effort_name or has_reasoning):
        notices.append(_notice("no_thinking", "this model does not think before it answers", ENABLED))
    effort_arguments, effort_notices = _with_effort(effort, variables, has_reasoning=has_reasoning)
    return translated | effort_arguments, (*notices, *effort_notices)


def _with_effort(
    effort: Any, variables: TemplateVariables, *, has_reasoning: bool
) -> tuple[dict[str, Any], list[Notice]]:
    """Translate an effort into the template's argument, as the nearest effort that the template supports."""
    name = variables.effort_name
    if effort is None:
        return {}, []
    if name is None:
        if effort == EFFORTS[0]:
            always = "thinking cannot be switched off: the template of this model has no switch for it"
            return {}, [_notice("no_thinking_switch", always, ENABLED)] if has_reasoning else []
        return {}, [_notice("no_effort", f"the template of this model takes no reasoning effort: {effort}", EFFORT)]
    if effort not in EFFORTS:
        return {name: effort}, []
    nearest = _nearest(effort, variables.efforts)
    template_value = variables.none if nearest == EFFORTS[0] else nearest
    if nearest == effort:
        return {name: template_value}, []
    supported = ", ".join(variables.efforts)
    message = f"a reasoning effort of {effort} is treated as {nearest}: this model's template supports {supported}"
    return {name: template_value}, [_notice("other_effort", message, EFFORT)]


def _nearest(effort: str, supported: tuple[str, ...]) -> str:
    """Return the nearest supported effort; the greater of two that are equally near."""
    rank = EFFORTS.index(effort)
    return min(supported, key=lambda candidate: (abs(EFFORTS.index(candidate) - rank), -EFFORTS.index(candidate)))


def _unsupported_argument(name: str) -> Notice:
    message = f"chat_template_kwargs: the template of this model does not read {name}"
    return _notice("unread_template_argument", message, "chat_template_kwargs")


def _notice(code: str, message: str, parameter: str) -> Notice:
    return Notice(code=code, message=message, parameter=parameter)
