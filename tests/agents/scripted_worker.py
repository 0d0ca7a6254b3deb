"""Answers of a model to coding agents: it corrects one word in the file that the user names, with the tools that the
prompt offers, in its template's call format. `python -m tests.agents.scripted_worker` is a worker of such models.
"""

from tests.scripted import worker  # prepares mlx, so it precedes all modules that import mlx

# isort: split
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents.task import GPT_OSS, MISTRAL, QWEN, RIGHT, TASK, WRONG

DONE = "The word is mended."
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Dialect:
    """Format of a template's calls and answers, and the mark before each tool result in its prompts."""

    call: Callable[[str, Arguments], str]
    result: str
    answer: Callable[[str], str] = lambda text: text


def qwen_call(name: str, arguments: Arguments) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"I look at it.\n</think>\n\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


DIALECTS = {
    "demo": Dialect(
        lambda name, arguments: f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>",
        "<tool_response>",
    ),
    QWEN: Dialect(qwen_call, "<tool_response>", lambda text: f"I look at it.\n</think>\n\n{text}"),
    MISTRAL: Dialect(
        lambda name, arguments: f"[TOOL_CALLS]{name}[CALL_ID]abc123DEF[ARGS]{json.dumps(arguments)}", "[TOOL_RESULTS]"
    ),
    GPT_OSS: Dialect(
        lambda name, arguments: (
            "<|channel|>analysis<|message|>I look at it.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        ),
        " to=assistant<|channel|>commentary<|message|>",
        lambda text: f"<|channel|>final<|message|>{text}<|return|>",
    ),
}
"""Dialect of each template, by its name."""


def calls_for(prompt: str, path: str) -> Sequence[tuple[str, Arguments]]:
    """Return the calls that the agent behind this prompt must run, in order; none if it offers no tools."""
    plays: Sequence[Sequence[tuple[str, Arguments]]] = (
        (
            ("Read", {"file_path": path}),
            ("Edit", {"file_path": path, "old_string": WRONG, "new_string": RIGHT}),
        ),
        (
            ("read", {"filePath": path}),
            ("edit", {"filePath": path, "oldString": WRONG, "newString": RIGHT}),
        ),
        (("exec_command", {"cmd": f"sed -i.before s/{WRONG}/{RIGHT}/ {path}"}),),
    )
    return next((play for play in plays if all(offers(prompt, name) for name, _ in play)), ())


def offers(prompt: str, name: str) -> bool:
    """Whether a tool of that name is in the prompt, as JSON or as TypeScript."""
    return f'"name": "{name}"' in prompt or f"\ntype {name} = (" in prompt


def answer(prompt: str, folder: Path) -> str:
    """Return what the model says next: a call, the whole file if the agent wants it as text, or that it is done."""
    dialect = DIALECTS[folder.name]
    task = re.search(rf"{TASK} (\S+\.txt)", prompt)
    if task is None:
        return dialect.answer(DONE)
    calls, answered = calls_for(prompt, task[1]), prompt.count(dialect.result)
    if answered < len(calls):
        return dialect.call(*calls[answered])
    if calls or WRONG not in prompt.replace(TASK, ""):
        return dialect.answer(DONE)
    return dialect.answer(f"{Path(task[1]).name}\n```\nHello, {RIGHT}\n```\n")


if __name__ == "__main__":
    sys.exit(worker.main(answer))
