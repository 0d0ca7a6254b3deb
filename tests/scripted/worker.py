"""The real worker with scripted models: templates, tokenizers, scheduler and frames are real, the choice of each token
is scripted. `python -m tests.scripted.worker` plays the texts of `plays.json`, a file next to the model folders.
"""

from app.worker import process  # prepares mlx, so it precedes all modules that import mlx

# isort: split
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from app.core.request import Request
from app.core.step import (
    DecodeRow,
    EngineLimits,
    PrefillStep,
    RowOutcome,
    StepPlan,
    StepResult,
)
from app.core.unit import PrefixState
from app.engine import memory
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.loader import load_unit
from app.engine.loading.pool import EnginePool
from app.engine.loading.warm_up import WarmUps
from app.engine.prefix.index import (
    BLOCK_OVERHEAD_BYTES,
    BLOCK_TOKENS,
    ROWS,
    BlockStore,
    CacheBlock,
    match_prefix,
    root_key,
)
from tests.scripted.folders import PLAYS
from tests.unmeasured import Unmeasured

PREFIX_BYTES = 16_384 * BLOCK_OVERHEAD_BYTES
Speak = Callable[[str, Path], str]
"""Function that maps a prompt and the model's folder to the model's answer."""


def play(prompt: str, folder: Path) -> str:
    """Return the play that the prompt names last, or an empty text if it names none."""
    named = re.findall(r"PLAY:(\w+)", prompt)
    plays = json.loads((folder.parent / PLAYS).read_text(encoding="utf-8"))
    return str(plays[named[-1]]) if named else ""


class ScriptedEngine:
    """`EnginePort` that emits what `speak` returns, as tokens of the model's own tokenizer; every draft is accepted.

    An answer ends at the first end mark in its text; the engine adds one after the text. Prompts hit the prefix cache
    as with the real index, but its blocks contain no state here.
    """

    cache_bytes = prefix_cache_bytes = 0
    prefix_state = PrefixState()
    cache_families = ("attention",)

    def __init__(self, unit: LoadedUnit, speak: Speak) -> None:
        self.limits = EngineLimits(unit.max_context_tokens, max_rows=8, drafters=("ngram",))
        self._folder = Path(unit.spec.path)
        self._speak = speak
        self._tokenizer = Tokenizer.from_file(f"{unit.spec.path}/tokenizer.json")
        self._ends: Sequence[int] = unit.config["eos_token_id"]
        self._scripts: dict[str, Sequence[int]] = {}
        self._chains: dict[str, bytes] = {}
        self._prefixes: BlockStore[None] = BlockStore(PREFIX_BYTES)

    def fetch(self, request: Request) -> bool:
        return True

    def admit(self, request: Request) -> int:
        prompt = self._tokenizer.decode(list(request.prompt_tokens), skip_special_tokens=False)
        text = self._speak(prompt, self._folder)
        self._scripts[request.id] = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._ends[0]]
        self._chains[request.id] = root_key(request.owner)
        return match_prefix((self._prefixes,), self._chains[request.id], request.prompt_tokens[:-1]).length

    def step(self, plan: StepPlan) -> StepResult:
        if isinstance(plan, PrefillStep):
            return StepResult(prefilled=tuple((row.sequence_id, row.end) for row in plan.rows))
        return StepResult(tuple(self._decode(row) for row in plan.rows), seconds=0.001)

    def _decode(self, row: DecodeRow) -> RowOutcome:
        position = len(row.tokens) - row.prompt_length
        emitted = tuple(self._scripts[row.sequence_id][position : position + 1 + row.num_draft_tokens])
        drafts = len(emitted) - 1
        return RowOutcome(row.sequence_id, emitted, len(row.tokens) + drafts, drafts, drafts, method=row.method)

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        self._scripts.pop(request_id, None)
        parent = self._chains.pop(request_id, b"")
        for begin in range(0, len(tokens) if parent else 0, BLOCK_TOKENS):
            block = CacheBlock.of(ROWS, parent, tokens[begin : begin + BLOCK_TOKENS])
            self._prefixes.make_room(BLOCK_OVERHEAD_BYTES)
            self._prefixes.add(block, None, BLOCK_OVERHEAD_BYTES)
            parent = block.key

    def drop_prefix_cache(self, retained_share: float = 0.0) -> None:
        if not retained_share:
            self._prefixes.clear()

    def bound_prefix_cache(self, limit_bytes: int) -> None: ...

    def close(self) -> None: ...


def main(speak: Speak) -> int:
    """Run a worker whose models say what `speak` returns."""

    def make_pool(ceiling_bytes: int, _costs: WarmUps) -> EnginePool:
        return EnginePool(
            ceiling_bytes=ceiling_bytes,
            load=load_unit,
            open_engine=lambda unit: ScriptedEngine(unit, speak),
            estimate=memory.footprint,
            costs=Unmeasured(),
        )

    return process.main(make_pool=make_pool)


if __name__ == "__main__":
    sys.exit(main(play))
