"""Whether and how much a model is to think before it answers, by every name that clients have for it, as one wish.

What the wish is called in a template, and what becomes of it where the template has no words for it, is the text
side's: `app/text/thinking.py`.
"""

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from app.core.messages import MAX_TEMPLATE_ARGUMENTS, SERVER_NAMES
from app.serving.gate import Body

ARGUMENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
MAX_BUDGET_TOKENS = (1 << 31) - 1
NO_BUDGET = -1

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(Body):
    """As Anthropic, DeepSeek and others say it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: int | None = Field(None, ge=0, le=MAX_BUDGET_TOKENS)


class ReasoningOptions(Body):
    """As OpenAI's Responses (`effort`) and OpenRouter say it."""

    model_config = ConfigDict(extra="allow")

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=MAX_BUDGET_TOKENS)


class ThinkingBody(Body):
    """The fields that say it; where several do, they should say the same."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    """As Qwen's and others' own servers have it."""
    think: bool | Effort | None = None
    """As Ollama has it."""
    thinking: Thinking | bool | None = None
    thinking_budget: int | None = Field(None, ge=NO_BUDGET, le=MAX_BUDGET_TOKENS)
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(
        None, max_length=MAX_TEMPLATE_ARGUMENTS
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in arguments or ():
            if ARGUMENT_NAME.fullmatch(name) is None or name in SERVER_NAMES:
                raise ValueError("a name is not allowed: it is malformed or set by the server")
        return arguments

    def thinking_fields(self) -> dict[str, Any]:
        """Collect the fields that were sent, for another body of this kind."""
        nested: dict[str, Any] = {"reasoning": set(ReasoningOptions.model_fields)}
        return self.model_dump(include=dict.fromkeys(ThinkingBody.model_fields, True) | nested, exclude_none=True)

    @property
    def effort(self) -> Effort | None:
        """Effort that was asked for; None: the model's own default."""
        nested = self.reasoning.effort if self.reasoning else None
        return self.reasoning_effort or nested or (None if isinstance(self.think, bool) else self.think)

    @property
    def wants_thinking(self) -> bool | None:
        """Whether to think at all; None: as the model does by itself."""
        thinking = self.thinking
        if isinstance(thinking, Thinking):
            thinking = None if thinking.type is None else thinking.type != "disabled"
        think = self.think if isinstance(self.think, bool) else None
        nested = self.reasoning.enabled if self.reasoning else None
        said = (each for each in (self.enable_thinking, think, thinking, nested) if each is not None)
        implied = False if self.budget_tokens == 0 else None
        return next(said, implied if self.effort is None else self.effort != "none")

    @property
    def budget_tokens(self) -> int | None:
        """After how many tokens the thinking is closed; None: the model decides."""
        own = self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None
        nested = self.reasoning.max_tokens if self.reasoning else None
        said = (each for each in (own, nested, self.thinking_budget) if each is not None)
        budget = next(said, None)
        return None if budget == NO_BUDGET else budget

    def template_arguments(self) -> dict[str, Any]:
        """The wish in the names that the text side knows, and what the client says to the template itself."""
        wish = {
            "enable_thinking": self.wants_thinking,
            "reasoning_effort": self.effort,
            "thinking_budget": self.budget_tokens,
        }
        return {name: value for name, value in wish.items() if value is not None} | (self.chat_template_kwargs or {})
