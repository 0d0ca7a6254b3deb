"""The objects of an answer, whole or in chunks: what chat and completions share, and how each says a choice."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.commands import GenerationBody
from app.core.messages import Delta, Finished, Generate, TokenText
from app.core.step import Statistics


@dataclass(slots=True)
class FinishedChoice:
    """Everything that one choice told."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: str = ""
    usage: Statistics = field(default_factory=Statistics)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def take(self, event: Delta | Finished) -> None:
        """Add what one event told."""
        if isinstance(event, Finished):
            self.finish_reason, self.usage = event.finish_reason, event.usage
        else:
            self.texts.append(event.text)
            self.logprobs.extend(event.logprobs)


class Renderer:
    """The objects of one answer to `command`, or to several like it; a subclass says what a choice looks like."""

    whole_name: str
    chunk_name: str

    def __init__(self, request_id: str, command: Generate, body: GenerationBody) -> None:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.id = request_id
        """What the client is told."""
        self.n = body.n or 1
        self.include_usage = include_usage
        """Whether a stream ends with the usage of all choices."""
        self.wants_logprobs = command.sampling.top_logprobs is not None
        self._no_drafter = command.model.no_drafter
        self._seed = command.sampling.seed if body.seed is None else body.seed
        self._base = {"id": request_id, "created": int(time.time()), "model": command.model.id}
        self._extra = {"usage": None} if include_usage else {}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before the first token."""
        return []

    def chunk(self, choice: int, event: Delta | Finished) -> dict[str, Any] | None:
        """What one event tells of a choice; the last one brings its numbers. None when there is nothing to tell."""
        if isinstance(event, Finished):
            return self._chunk(self.piece(choice, "", event.finish_reason)) | self._numbers(event.usage)
        if not event.text and not event.logprobs:
            return None
        piece = self.piece(choice, event.text)
        if event.logprobs:
            piece["logprobs"] = self.logprobs(choice, event.logprobs)
        if event.accepted_spans:
            piece["accepted_spans"] = event.accepted_spans
            piece["method"] = event.method
        return self._chunk(piece)

    def usage(self, usages: Sequence[Statistics]) -> dict[str, Any]:
        """The chunk without choices at the end of a stream."""
        total = Statistics.side_by_side(usages, choices_per_prompt=self.n)
        return self._base | {"object": self.chunk_name, "choices": [], "usage": usage_object(total)}

    def whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        """The answer in one piece."""
        total = Statistics.side_by_side([each.usage for each in finished], choices_per_prompt=self.n)
        choices = [self.whole_choice(index, each) for index, each in enumerate(finished)]
        named = self._base | {"object": self.whole_name, "choices": choices, "usage": usage_object(total)}
        return named | self._numbers(total)

    def piece(self, index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        """One choice of a chunk; with a reason it is the last of this choice and has no text."""
        raise NotImplementedError

    def logprobs(self, choice: int, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """The `logprobs` of the next tokens of a choice."""
        raise NotImplementedError

    def whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        """One choice of the answer in one piece."""
        raise NotImplementedError

    def _chunk(self, piece: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "object": self.chunk_name, "choices": [piece], **self._extra}

    def _numbers(self, usage: Statistics) -> dict[str, Any]:
        return {"timings": usage.timings(), "speculation": usage.speculation(self._no_drafter), "seed": self._seed}


class ChatRenderer(Renderer):
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """The role, once for each choice."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(self.piece(index, "") | {"delta": role}) for index in range(self.n)]

    def piece(self, index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        delta = {} if finish_reason else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, choice: int, tokens: Sequence[TokenText]) -> dict[str, Any]:  # noqa: ARG002 - all are alike
        return {"content": [_chat_token(token) for token in tokens], "refusal": None}

    def whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": finished.text, "refusal": None},
            "logprobs": self.logprobs(index, finished.logprobs) if self.wants_logprobs else None,
            "finish_reason": finished.finish_reason,
        }


class CompletionRenderer(Renderer):
    """OpenAI's `text_completion`; `text_offset` of the log probs counts characters of a choice."""

    whole_name = chunk_name = "text_completion"

    def __init__(self, request_id: str, command: Generate, body: GenerationBody) -> None:
        super().__init__(request_id, command, body)
        self._offsets: dict[int, int] = {}

    def piece(self, index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, choice: int, tokens: Sequence[TokenText]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(choice, 0))
            self._offsets[choice] = offsets[-1] + len(token.token)
        tops = [None if each.logprob is None else {text: value for text, value, _ in each.top} for each in tokens]
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        logprobs = self.logprobs(index, finished.logprobs) if self.wants_logprobs else None
        return self.piece(index, finished.text, finished.finish_reason) | {"logprobs": logprobs}


def usage_object(usage: Statistics) -> dict[str, Any]:
    """OpenAI's `usage`, with its own fields for drafts: accepted and rejected prediction tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


def _chat_token(token: TokenText) -> dict[str, Any]:
    entry = {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}
    top = [{"token": text, "logprob": logprob, "bytes": list(raw)} for text, logprob, raw in token.top]
    return entry | {"top_logprobs": top}
