"""One installed model under `paceline bench MODEL`: turns over our engine and scheduler, in this process."""

from collections import Counter
from collections.abc import Mapping

from app.benchmark.ours import OurSide, Run
from app.benchmark.prompts import Prompts
from app.core.request import SpeculationRequest
from app.serving.sweep.grid import LENGTHS, PLAIN, Cell, Setting
from app.serving.sweep.tasks import FEWEST_TOKENS, TOKENS, WARM_UP_TOKENS
from app.serving.sweep.turns import Turn


class ModelSide:
    """Asks `prompts` of `ours`, greedily; answers end where the model ends them (`stop_token_ids`)."""

    def __init__(self, ours: OurSide, prompts: Prompts, stop_token_ids: frozenset[int], tokens: int = TOKENS) -> None:
        self._ours = ours
        self._prompts = prompts
        self._stops = stop_token_ids
        self._tokens = tokens
        self._endless: set[tuple[Cell, int]] = set()

    @property
    def methods(self) -> Mapping[str, int]:
        """The methods that can run, each with its longest draft."""
        available = self._ours.engine.drafters.available
        return {name: drafter.longest or LENGTHS[-1] for name, drafter in available.items()}

    def turn(self, cell: Cell, setting: Setting, number: int, *, warm_up: bool = False) -> Turn:
        """One turn; a warm-up asks for fewer tokens."""
        run = self._run(cell, setting, number, warm_up=warm_up)
        if setting == PLAIN and not warm_up and run.tokens < FEWEST_TOKENS * cell.rows:
            self._endless.add((cell, number))
            run = self._run(cell, setting, number, warm_up=False)
        return turn_of(run)

    def _run(self, cell: Cell, setting: Setting, number: int, *, warm_up: bool) -> Run:
        return self._ours.run(
            [self._prompts.tokens(number, row, cell.context) for row in range(cell.rows)],
            WARM_UP_TOKENS if warm_up else self._tokens,
            SpeculationRequest(method=setting.method, num_draft_tokens=setting.drafts or None),
            frozenset() if (cell, number) in self._endless else self._stops,
        )


def turn_of(run: Run) -> Turn:
    """The figures of one run; the rate is that of decoding, unless one step said everything."""
    drafted = sum(one.drafted for one in run.statistics)
    accepted = sum(one.accepted for one in run.statistics)
    cycles = sum(one.cycles for one in run.statistics)
    used = Counter(outcome.method for _, result in run.cycles for outcome in result.outcomes if outcome.drafted)
    return Turn(
        tokens_per_second=run.clock.tokens_per_second or run.tokens_per_second,
        seconds=run.seconds,
        prompt_seconds=run.prompt_seconds,
        acceptance=accepted / drafted if drafted else None,
        tokens_per_cycle=(accepted + cycles) / cycles if cycles else None,
        method=used.most_common(1)[0][0] if used else "",
    )
