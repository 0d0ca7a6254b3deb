"""What a model has to say to coding agents: it mends one word in the file that the user names, with whatever tools the
prompt offers. `python -m tests.agents.scripted_worker` is a worker of such models.
"""

from tests.scripted import worker  # it prepares mlx, before anything else imports that

# isort: split
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.agents.task import RIGHT, TASK, WRONG

DONE = "The word is mended."
Call = tuple[str, Mapping[str, Any]]


def calls_for(prompt: str, path: str) -> Sequence[Call]:
    """What the agent that wrote this prompt has to run, one after the other; nothing where it offers no tools."""
    plays: Sequence[Sequence[Call]] = (
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
    return next((play for play in plays if all(f'"name": "{name}"' in prompt for name, _ in play)), ())


def answer(prompt: str, _: Path) -> str:
    """What the model says next: a call, the whole file where the agent wants it as text, or that it is done."""
    task = re.search(rf"{TASK} (\S+\.txt)", prompt)
    if task is None:
        return DONE
    calls, told = calls_for(prompt, task[1]), prompt.count("<tool_response>")
    if told < len(calls):
        name, arguments = calls[told]
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    if calls or WRONG not in prompt.replace(TASK, ""):
        return DONE
    return f"{Path(task[1]).name}\n```\nHello, {RIGHT}\n```\n"


if __name__ == "__main__":
    sys.exit(worker.main(answer))
