"""The scripted drafter is right as often as the script says, and `RaggedRows` rewinds its caches."""

from pathlib import Path

import pytest

from app.core.request import SpeculationRequest
from bench.comparison.caches_alone import RETAINED, WIDTH, RaggedRows
from bench.comparison.ours import PLAIN, OurSide
from bench.comparison.pairs import Sizes
from bench.comparison.scripted import BLOCK_SIZE, Script, open_scripted
from bench.comparison.speculation_cases import acceptance_per_slot
from bench.comparison.workshop import PairFolders, Workshop
from tests.shares import LANDING

TINY = Sizes(hidden=64, layers=4, vocabulary=2048)


@pytest.mark.parametrize(
    ("wanted", "least", "most"),
    [pytest.param(1.0, 1.0, 1.0, marks=LANDING), pytest.param(0.0, 0.0, 0.0, marks=LANDING), (0.8, 0.6, 0.95)],
)
def test_scripted_drafts_are_accepted_as_often_as_the_script_says(
    tmp_path: Path, wanted: float, least: float, most: float
) -> None:
    workshop, script = Workshop(tmp_path, TINY, drafts=2), Script(wanted)
    ours = OurSide(
        PairFolders(workshop.attention_pair().target, None), open_unit=lambda unit: open_scripted(unit, script)
    )
    prompt = workshop.prompt(0)
    plain = ours.run([prompt], 64, PLAIN)
    script.record(prompt, next(iter(plain.texts.values())))
    drafted = ours.run([prompt], 64, SpeculationRequest(method="dflash", num_draft_tokens=BLOCK_SIZE - 1))
    ours.close()
    assert list(drafted.texts.values()) == list(plain.texts.values())
    assert least <= acceptance_per_slot(drafted) <= most


def test_a_script_is_wrong_in_the_same_places_every_time() -> None:
    script = Script(0.5)
    script.record([7, 8], range(100, 200))
    assert script.drafts([7, 8], 3, 8) == script.drafts([7, 8], 3, 8)
    assert script.drafts([7, 8], 3, 8)[1:] == script.drafts([7, 8], 4, 7)
    assert script.drafts([9], 0, 2) != []


def test_ragged_rows_keep_what_each_cycle_says() -> None:
    rows = RaggedRows(600, layers=1, heads=1, dimension=8)
    rows.turn(len(RETAINED))
    lengths = [rows._runner.length(name) for name in rows._names]
    assert lengths == [600 + sum(kept[row] for kept in RETAINED) for row in range(4)]
    assert max(max(kept) for kept in RETAINED) <= WIDTH
