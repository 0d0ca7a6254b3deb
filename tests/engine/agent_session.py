"""A coding agent's session, as an engine sees it: tools in the system prompt, tool results, reasoning that the template
strips from earlier turns, and a context that grows with every turn."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.core.step import PrefillStep
from app.engine.engine import Engine
from app.engine.prefix.disk import NO_DISK, Disk
from app.scheduler.scheduler import Scheduler
from app.text.prompt.template import TextModel
from tests.engine.driving import build
from tests.engine.schedules import FEATURE_METHODS
from tests.text.tokenizer_fixture import byte_level, write_folder
from tests.tiny import related_draft, tiny_model
from tests.tiny_drafters import tiny_drafter

FAMILIES = ("qwen3", "gemma3", "qwen3_next")
"""Families with full attention only, with sliding windows too, and with recurrent layers too."""
DRAFTERS = ("ngram", "draft_model", *FEATURE_METHODS)
TURNS = 25
VOCABULARY = 97
"""Vocabulary size of the tiny models; prompt tokens are taken modulo it."""
TEMPLATE = """
{%- set last = namespace(user=0) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
<|im_start|>system
{{ messages[0].content }}
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% for message in messages[1:] -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index > last.user and message.reasoning_content -%}
<think>{{ message.reasoning_content }}</think>
{%- endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""Chat template that, like Qwen3's, keeps only the reasoning after the last user message."""
WORDS = ("the function", "returns", "a list", "of", "names", "and", "its test", "fails", "where value is", "None", "or")


def agent_text(folder: Path) -> TextModel:
    """Write and load the session's tokenizer and chat template."""
    return TextModel.load(write_folder(folder, byte_level(), template=TEMPLATE))


def engine_of(
    family: str, drafter: str, *, prefix_bytes: int = 1 << 30, room_tokens: int = 4096, disk: Disk = NO_DISK
) -> Engine:
    """Return an engine for a tiny model of `family` with one drafter."""
    target, draft = tiny_model(family), related_draft(family)  # not shared: an engine taps its target
    features = {drafter: tiny_drafter(drafter, family, target)} if drafter in FEATURE_METHODS else None
    draft_model = draft if drafter == "draft_model" else None
    return build(
        target,
        draft=draft_model,
        features=features,
        prefix_bytes=prefix_bytes,
        chunk_tokens=512,
        max_context_tokens=room_tokens,
        disk=disk,
    )


@dataclass
class Turn:
    """Cost and result of one turn. `new_tokens`: prompt tokens after the longest prefix of any earlier text."""

    prompt: tuple[int, ...]
    cached_tokens: int
    new_tokens: int
    read_tokens: int
    """Tokens read by the target's prefill and first decode step."""
    drafter_tokens: int
    """Tokens read by the drafter that read most, up to the first output token."""
    cycles: int
    accepted: int
    first_token_seconds: float
    """Seconds from the submission of the prompt's token ids to the first output token."""
    output: tuple[int, ...]


@dataclass
class Session:
    """Turns of one agent. `reopen` takes a turn's number and returns its engine, the same as before or a new one."""

    text: TextModel
    system_words: int
    turn_words: int
    tool_words: int = 3
    speculation: SpeculationRequest = field(default_factory=SpeculationRequest)
    answer_tokens: int = 5
    said: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, reopen: Callable[[int], Engine], turns: int = TURNS) -> list[Turn]:
        return list(islice(self.take_turns(reopen), turns))

    def take_turns(self, reopen: Callable[[int], Engine]) -> Iterator[Turn]:
        """Yield the turns one after the other, without end."""
        for number, (messages, tools) in enumerate(self._chats()):
            tokens, checkpoints, _ = self.text.render_chat(messages, tools)
            request = Request(
                id=f"turn {number}",
                owner="agent",
                prompt_tokens=tuple(token % VOCABULARY for token in tokens),
                checkpoints=checkpoints,
                max_tokens=self.answer_tokens,
                sampling=SamplingParameters(temperature=0.0),
                speculation=self.speculation,
            )
            yield self._turn(reopen(number), request)

    def _chats(self) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
        """Yield the messages and tools that the client sends in each turn; four turns in five add a tool result."""
        chance = random.Random(7)
        words = lambda count: " ".join(chance.choices(WORDS, k=count))  # noqa: E731
        tools = [
            {"type": "function", "function": {"name": f"tool_{n}", "description": words(self.tool_words)}}
            for n in range(4)
        ]
        messages = [{"role": "system", "content": words(self.system_words)}]
        for number in range(10**6):
            role = "user" if number % 5 == 0 else "tool"
            messages.append({"role": role, "content": words(self.turn_words)})
            yield list(messages), tools
            thought, answer = words(6), words(8)
            messages.append({"role": "assistant", "reasoning_content": thought, "content": answer})

    def _turn(self, engine: Engine, request: Request) -> Turn:
        scheduler = Scheduler(engine.limits, policy="auto")
        started, first_token_seconds = perf_counter(), 0.0
        scheduler.submit(request)
        head = scheduler.next_admission()
        assert head is not None
        cached = engine.admit(head)
        scheduler.admitted(head.id, cached)
        before, drafter_tokens = drafter_lengths(engine, request.id), 0
        output: list[int] = []
        read, end = 0, None
        while (plan := scheduler.plan()) is not None:
            if isinstance(plan, PrefillStep):
                read += sum(row.end - row.start for row in plan.rows)
            elif not output:
                read += sum(len(row.tokens) - row.computed for row in plan.rows)
            result = engine.step(plan)
            if not output:
                after = drafter_lengths(engine, request.id)
                drafter_tokens = max((after[name] - before.get(name, 0) for name in after), default=0)
            for event in scheduler.commit(result):
                output += event.tokens
                end = event.statistics if event.finish_reason else end
            if output and not first_token_seconds:
                first_token_seconds = perf_counter() - started
        for name, tokens in scheduler.drain_released():
            engine.release(name, tokens)
        assert end is not None
        known = max((shared(request.prompt_tokens, text) for text in self.said), default=0)
        self.said.append((*request.prompt_tokens, *output))
        return Turn(
            prompt=request.prompt_tokens,
            cached_tokens=cached,
            new_tokens=len(request.prompt_tokens) - known,
            read_tokens=read,
            drafter_tokens=drafter_tokens,
            cycles=end.cycles,
            accepted=end.accepted,
            first_token_seconds=first_token_seconds,
            output=tuple(output),
        )


def drafter_lengths(engine: Engine, request_id: str) -> dict[str, int]:
    """Return the number of a request's cached tokens in each drafter that has its own model."""
    runners = engine.drafters.runners
    return {name: runner.length(request_id) for name, runner in runners.items() if request_id in runner.rows}


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (token, other) in enumerate(pairs) if token != other), min(len(first), len(second)))
