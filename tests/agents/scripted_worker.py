"""The real worker around a model that plays a part: templates, tokens, scheduler and frames are real, the choice of
each token is not. It mends one word in the file that the user names, with whatever tools the prompt offers.
"""

from app.worker import process  # it prepares mlx, before anything else imports that

# isort: split
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from app.core.prefix_files import PrefixState
from app.core.request import Request
from app.core.step import DecodeRow, EngineLimits, PrefillStep, RowOutcome, StepCost, StepPlan, StepResult
from app.engine import memory
from app.engine.drafters import LoadedUnit
from app.engine.loader import load_unit
from app.engine.pool import EnginePool
from app.engine.warm_up import CostFiles

WRONG, RIGHT = "wrold", "world"
TASK = f"Replace {WRONG} by {RIGHT} in"
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


def answer(prompt: str) -> str:
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


class ScriptedEngine:
    """`EnginePort` that says what `answer` does, as tokens of the model's own tokenizer; every draft is accepted."""

    cache_bytes = prefix_cache_bytes = 0
    prefix_state = PrefixState()
    cache_families = ("attention",)

    def __init__(self, unit: LoadedUnit) -> None:
        self.measured: Sequence[StepCost] = ()
        self.limits = EngineLimits(unit.max_context_tokens, max_rows=8, drafters=("ngram",))
        self._tokenizer = Tokenizer.from_file(f"{unit.spec.path}/tokenizer.json")
        self._end = int(unit.config["eos_token_id"][0])
        self._scripts: dict[str, Sequence[int]] = {}

    def admit(self, request: Request) -> int:
        prompt = self._tokenizer.decode(list(request.prompt_tokens), skip_special_tokens=False)
        self._scripts[request.id] = [*self._tokenizer.encode(answer(prompt), add_special_tokens=False).ids, self._end]
        return len(request.prompt_tokens) - 1

    def step(self, plan: StepPlan) -> StepResult:
        if isinstance(plan, PrefillStep):
            return StepResult(prefilled=tuple((row.sequence_id, row.end) for row in plan.rows))
        return StepResult(tuple(self._decode(row) for row in plan.rows), seconds=0.001)

    def _decode(self, row: DecodeRow) -> RowOutcome:
        told = len(row.tokens) - row.prompt_length
        emitted = tuple(self._scripts[row.sequence_id][told : told + 1 + row.num_draft_tokens])
        drafts = len(emitted) - 1
        return RowOutcome(row.sequence_id, emitted, len(row.tokens) + drafts, drafts, drafts, method=row.method)

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        self._scripts.pop(request_id, None)

    def clear_prefix_cache(self) -> None: ...

    def drop_prefix_cache(self, kept_share: float = 0.0) -> None: ...

    def bound_prefix_cache(self, limit_bytes: int) -> None: ...

    def close(self) -> None: ...


def make_pool(ceiling_bytes: int, _costs: CostFiles) -> EnginePool:
    return EnginePool(
        ceiling_bytes=ceiling_bytes, load=load_unit, open_engine=ScriptedEngine, estimate=memory.footprint
    )


if __name__ == "__main__":
    sys.exit(process.main(make_pool=make_pool))
