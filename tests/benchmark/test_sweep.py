"""Settings take turns within the time budget, and results are kept. The clock is scripted: nothing is timed."""

import contextlib

import pytest

from app.serving.sweep.grid import (
    GOVERNOR,
    GRIDS,
    MAIN,
    PLAIN,
    Cell,
    MeasuredTurn,
    Setting,
    Sweep,
    cells,
    ranked,
    settings_of,
    turns,
)
from app.serving.sweep.report import report_of
from tests.benchmark.sweeps import ScriptedSide, swept

METHODS = {"dflash": 7, "ngram": 16}
CELLS = cells(GRIDS["full"], max_rows=8, max_context_tokens=20_000, tokens=64)


def dflash_pays(cell: Cell, setting: Setting) -> float:
    """Return a speed that is highest with six DFlash drafts."""
    gain = {"off": 1.0, "auto": 1.9, "ngram": 0.9}.get(setting.method, 2.0 - 0.1 * abs(setting.drafts - 6))
    return 100.0 * cell.rows * gain


def run(side: ScriptedSide, seconds: float, *, rounds: int = 3) -> Sweep:
    sweep = Sweep()
    asking = turns(sweep, CELLS, METHODS, budget=side.budget(seconds), rounds=rounds)
    turn: MeasuredTurn | None = None
    while True:
        try:
            ask = asking.send(turn) if turn is not None else next(asking)
        except StopIteration:
            return sweep
        turn = side.turn(ask.cell, ask.setting, ask.number, warm_up=ask.warm_up)


def test_with_time_enough_everything_is_measured() -> None:
    side = ScriptedSide(dflash_pays)
    sweep = run(side, 100_000)
    assert list(sweep.measured) == list(CELLS)
    assert sweep.skipped == []
    assert not sweep.interrupted
    for cell in CELLS:
        drafted = {(setting.method, setting.drafts) for setting in sweep.measured[cell]}
        assert len(drafted) == 2 + 6 + 8
        assert all(len(turns) == 3 for turns in sweep.measured[cell].values())


def test_a_round_asks_plain_decoding_first_and_every_setting_the_same() -> None:
    side = ScriptedSide(dflash_pays)
    run(side, 100_000)
    asked = [(setting, number) for cell, setting, number, warm_up in side.turns if cell == MAIN and not warm_up]
    rounds = [[setting for setting, at in asked[1:] if at == number] for number in range(3)]
    assert asked[0] == (PLAIN, 0), "the first turn only reads the prompt"
    assert rounds[0][0] == rounds[1][0] == rounds[2][0] == PLAIN
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.parametrize("seconds", [20.0, 60.0, 180.0])
def test_little_time_thins_the_grid_and_is_kept(seconds: float) -> None:
    side = ScriptedSide(dflash_pays)
    sweep = run(side, seconds)
    assert side.now <= seconds * 1.25
    assert next(iter(sweep.measured)) == MAIN
    assert sweep.skipped == [cell for cell in CELLS if cell not in sweep.measured]
    plain_first = [cell for cell in sweep.measured if GOVERNOR not in sweep.measured[cell]]
    assert plain_first == [], "every measured cell compares"


def test_other_cells_stay_around_the_best_length_of_the_first() -> None:
    side = ScriptedSide(dflash_pays)
    sweep = run(side, 60.0)
    best = next(setting for setting in ranked(sweep, settings_of(METHODS)) if setting.method == "dflash")
    others = [cell for cell in sweep.measured if cell != MAIN]
    assert others
    assert all(best in sweep.measured[cell] for cell in others)


def test_no_time_at_all_still_compares_in_the_first_cell() -> None:
    side = ScriptedSide(dflash_pays)
    sweep = run(side, 0.1)
    assert list(sweep.measured) == [MAIN]
    assert {setting.method for setting in sweep.measured[MAIN]} == {"off", "auto", "dflash", "ngram"}


def test_a_ratio_pairs_the_rounds_that_both_ran() -> None:
    sweep = Sweep()
    for plain, drafted in [(10, 20), (1, 3), (10, 20)]:
        sweep.add(MAIN, PLAIN, MeasuredTurn(plain, 1.0))
        sweep.add(MAIN, Setting("ngram", 4), MeasuredTurn(drafted, 1.0))
    sweep.add(MAIN, PLAIN, MeasuredTurn(1000, 1.0))
    assert report_of(sweep.results()).cells[0].settings[1].ratio == 2.0


def test_the_best_length_of_each_method_comes_first_in_further_cells() -> None:
    sweep = swept(
        {(1, "off", 0): 10, (1, "auto", 0): 40, (1, "dflash", 4): 30, (1, "ngram", 2): 12, (1, "ngram", 4): 9}
    )
    order = ranked(sweep, settings_of(METHODS))
    assert order[:5] == [PLAIN, GOVERNOR, Setting("dflash", 4), Setting("ngram", 2), Setting("ngram", 4)]
    assert set(order) == set(settings_of(METHODS))


@pytest.mark.parametrize(("seconds", "settings", "rounds"), [(100.0, 16, 3), (20.0, 6, 3), (6.0, 4, 2), (0.0, 4, 1)])
def test_fewer_settings_are_taken_before_a_single_round(seconds: float, settings: int, rounds: int) -> None:
    """Three rounds of few settings tell more than two rounds of many."""
    side, sweep = ScriptedSide(lambda _cell, _setting: 100.0), Sweep()
    asking = turns(sweep, [MAIN], METHODS, budget=side.budget(seconds), rounds=3)
    ask = next(asking)
    with contextlib.suppress(StopIteration):
        while True:
            ask = asking.send(side.turn(ask.cell, ask.setting, ask.number, warm_up=ask.warm_up))
    assert len(sweep.measured[MAIN]) == settings
    assert max(map(len, sweep.measured[MAIN].values())) == rounds
