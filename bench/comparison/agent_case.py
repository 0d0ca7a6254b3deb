"""Compares an agent's wait for the first token in its last turns with that in its first turns: prompts of 8k tokens and
more, about 100 of them new.

The models are tiny: with large ones, our own costs that grow with every turn (lookups, restoring, copying, reading by
drafters) would not show. One session's last turns alternate with another's first turns: a slow second affects both.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from app.core.request import SpeculationRequest
from app.engine.engine import Engine
from app.engine.prefix.disk import NO_DISK, Disk
from app.text.prompt.template import TextModel
from bench.comparison.cases import Bench, Case
from bench.comparison.measure import CaseResult, Check, Contender, Sample, Series
from bench.comparison.ours import PLAIN
from tests.engine.agent_session import DRAFTERS, FAMILIES, TURNS, Session, agent_text, engine_of

COMPARED_TURNS = 3
WARM_UP_TURNS, WARM_UP_WORDS = 5, 100
SYSTEM_WORDS = 12
"""Words of the system text per token of `Bench.tokens`: with the usual 128, a first prompt of about 8,000 tokens."""
TURN_WORDS = 2
ROOM_TOKENS = 16_384
DISK_BYTES = 1 << 30
PATIENCE_SECONDS = 60.0
NO_DRAFTER = "none"
SUMMARY = "an agent's wait for the first token in turns 23 to 25 against turns 2 to 4, over contexts of 8k tokens"


@dataclass(frozen=True, slots=True)
class Setting:
    """Model family and drafter; `restarts`: a new engine for each turn, which finds the earlier turns on disk."""

    family: str
    drafter: str
    restarts: bool = False

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.family}, {self.drafter}{', restarts' if self.restarts else ''}"

    @property
    def speculation(self) -> SpeculationRequest:
        """Speculation that drafts from the first cycle on, so that the wait includes what the drafter reads."""
        return PLAIN if self.drafter == NO_DRAFTER else SpeculationRequest(method=self.drafter, num_draft_tokens=4)


SETTINGS = (
    *(Setting(family, drafter) for family in FAMILIES for drafter in (NO_DRAFTER, *DRAFTERS)),
    *(Setting(family, drafter, restarts=True) for family in FAMILIES for drafter in (NO_DRAFTER, "eagle3")),
)


class EngineOpener:
    """Opens the engine for each turn of one session."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._engine: Engine | None = None

    def __call__(self, _: int) -> Engine:
        setting = self._setting
        if self._engine is None or setting.restarts:
            self.close()
            disk = Disk(self._folder, DISK_BYTES) if setting.restarts else NO_DISK
            self._engine = engine_of(setting.family, setting.drafter, room_tokens=ROOM_TOKENS, disk=disk)
        return self._engine

    def close(self) -> None:
        """Flush the disk, then close the engine."""
        if self._engine is not None:
            self._engine.prefixes.disk.flush(PATIENCE_SECONDS)
            self._engine.close()


def contender_of(setting: Setting, text: TextModel, system_words: int) -> Contender:
    """Make a contender whose turn runs one session, its last turns alternating with another's first ones; in ms."""

    def turn(number: int) -> Sample:
        turns, words = (WARM_UP_TURNS, WARM_UP_WORDS) if number < 0 else (TURNS, system_words)
        with ExitStack() as stack:
            sessions = []
            for _ in range(2):
                opener = EngineOpener(setting, Path(stack.enter_context(TemporaryDirectory(prefix="paceline-bench-"))))
                stack.callback(opener.close)
                session = Session(text, words, TURN_WORDS, speculation=setting.speculation)
                sessions.append(session.take_turns(opener))
            late_session, early_session = sessions
            _, *middle = islice(late_session, turns - COMPARED_TURNS)
            next(early_session)
            pairs = list(islice(zip(early_session, late_session, strict=False), COMPARED_TURNS))
        later = [*middle, *(late for _, late in pairs)]
        new = sum(later_turn.new_tokens for later_turn in later)
        notes = {
            "tokens": len(later[-1].prompt),
            "turns 2 to 4 ms": 1_000 * median(early.first_token_seconds for early, _ in pairs),
            "ratio": median(late.first_token_seconds / early.first_token_seconds for early, late in pairs),
            "read": sum(later_turn.read_tokens for later_turn in later) / new,
            "read by the drafter": sum(later_turn.drafter_tokens for later_turn in later) / new,
        }
        return Sample(1_000 * median(late.first_token_seconds for _, late in pairs), notes)

    return Contender(setting.name, turn)


def run_agent_session(bench: Bench) -> CaseResult:
    """Check the worst setting of each family, and the tokens read per new token."""
    with TemporaryDirectory(prefix="paceline-bench-") as folder:
        text = agent_text(Path(folder))
    contenders = [contender_of(setting, text, SYSTEM_WORDS * bench.tokens) for setting in SETTINGS]
    series = tuple(bench.measure(*contenders).values())
    by_family = {family: [entry for entry in series if entry.name.startswith(f"{family},")] for family in FAMILIES}
    waits = (
        Check(f"turn 25 / turn 2, {family}", largest_median(by_family[family], "ratio"), 1.3, "at most")
        for family in FAMILIES
    )
    reads = (Check(f"tokens {note} / new", largest_median(series, note), 1.1, "at most") for note in READS)
    return CaseResult("agent_session", SUMMARY, "ms", series, (*waits, *reads))


READS = ("read", "read by the drafter")


def largest_median(series: Sequence[Series], note: str) -> float:
    """Return the largest median of a note over all series."""
    return max(entry.median_notes()[note] for entry in series)


AGENT_CASES = (Case("agent_session", SUMMARY, run_agent_session),)
