"""What a model has to say to coding agents: it mends one word in the file that the user names, with whatever tools the
prompt offers, in the words of its template. `python -m tests.agents.scripted_worker` is a worker of such models.
"""

from tests.scripted import worker  # it prepares mlx, before anything else imports that

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
    """How models of a template write calls and answers, and what stands before each result that they are given."""

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
"""By template."""


def calls_for(prompt: str, path: str) -> Sequence[tuple[str, Arguments]]:
    """What the agent that wrote this prompt has to run, one after the other; nothing where it offers no tools."""
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
    """What the model says next: a call, the whole file where the agent wants it as text, or that it is done."""
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
