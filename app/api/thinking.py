"""Whether and how much a model should reason before it answers, under all the names that clients use for it.

`app/text/prompt/thinking.py` translates these settings for chat templates, and handles templates that lack them.
"""

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from app.core.messages import MAX_TEMPLATE_ARGUMENTS, RESERVED_TEMPLATE_NAMES
from app.serving.gate import Body

ARGUMENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
MAX_BUDGET_TOKENS = (1 << 31) - 1
NO_BUDGET = -1

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(Body):
    """Reasoning options in the format of Anthropic, DeepSeek and others."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"] | None = None
    budget_tokens: int | None = Field(None, ge=0, le=MAX_BUDGET_TOKENS)


class ReasoningOptions(Body):
    """Reasoning options in the format of OpenAI's Responses (`effort`) and OpenRouter."""

    model_config = ConfigDict(extra="allow")

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=MAX_BUDGET_TOKENS)


class ThinkingBody(Body):
    """Fields that control reasoning; several of them in one request should agree."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    """Whether to reason; used by Qwen's own server and others."""
    think: bool | Effort | None = None
    """Whether to reason, or the effort; used by Ollama."""
    thinking: Thinking | bool | None = None
    thinking_budget: int | None = Field(None, ge=NO_BUDGET, le=MAX_BUDGET_TOKENS)
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(
        None, max_length=MAX_TEMPLATE_ARGUMENTS
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in arguments or ():
            if ARGUMENT_NAME.fullmatch(name) is None or name in RESERVED_TEMPLATE_NAMES:
                raise ValueError("a name is not allowed: it is malformed or set by the server")
        return arguments

    def thinking_fields(self) -> dict[str, Any]:
        """Return the reasoning fields that were sent, to pass on to another body."""
        nested: dict[str, Any] = {"reasoning": set(ReasoningOptions.model_fields)}
        return self.model_dump(include=dict.fromkeys(ThinkingBody.model_fields, True) | nested, exclude_none=True)

    @property
    def effort(self) -> Effort | None:
        """Requested effort; None: the model's own default."""
        nested = self.reasoning.effort if self.reasoning else None
        return self.reasoning_effort or nested or (None if isinstance(self.think, bool) else self.think)

    @property
    def wants_thinking(self) -> bool | None:
        """Whether to reason at all; None: the model's own default."""
        thinking = self.thinking
        if isinstance(thinking, Thinking):
            thinking = None if thinking.type is None else thinking.type != "disabled"
        think = self.think if isinstance(self.think, bool) else None
        nested = self.reasoning.enabled if self.reasoning else None
        stated = (value for value in (self.enable_thinking, think, thinking, nested) if value is not None)
        implied = False if self.budget_tokens == 0 else None
        return next(stated, implied if self.effort is None else self.effort != "none")

    @property
    def budget_tokens(self) -> int | None:
        """Limit on reasoning, in tokens; None: the model decides."""
        own = self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None
        nested = self.reasoning.max_tokens if self.reasoning else None
        limits = (limit for limit in (own, nested, self.thinking_budget) if limit is not None)
        budget = next(limits, None)
        return None if budget == NO_BUDGET else budget

    def template_arguments(self) -> dict[str, Any]:
        """Return the settings under the names that the text process reads, and the client's own template arguments."""
        settings = {
            "enable_thinking": self.wants_thinking,
            "reasoning_effort": self.effort,
            "thinking_budget": self.budget_tokens,
        }
        return {name: value for name, value in settings.items() if value is not None} | (
            self.chat_template_kwargs or {}
        )
