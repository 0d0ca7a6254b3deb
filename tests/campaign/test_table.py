"""Results that a campaign prints at its end, and the choice of the attack that has the next turn."""

from io import StringIO

import pytest
from rich.console import Console

from campaign.attack import Attack, TurnContext, next_attack
from campaign.judgement import FIRST_TOKEN, MIN_SAMPLES, PROMISES, SILENCE, Findings, Memory, Timed
from campaign.plan import LEGS, QUIET, SHARES, chosen_legs
from campaign.table import as_table, memory_table, verdict


async def nothing(_context: TurnContext) -> None: ...


LOUD, KILLS = Attack("loud", "", nothing), Attack("kills", "", nothing, 3.0, {FIRST_TOKEN: PROMISES[FIRST_TOKEN]})
MEGABYTE = 1 << 20


def timed(*seconds: float) -> list[Timed]:
    return [Timed(duration) for duration in seconds]


def shown(findings: dict[Attack, Findings], slow: float = 1.0) -> str:
    console = Console(width=160, file=StringIO(), record=True)
    console.print(
        as_table(findings, slow), memory_table({"server": [Memory(1, 7 * MEGABYTE), Memory(1, 9 * MEGABYTE)]})
    )
    return console.export_text()


def cells(text: str, name: str) -> list[str]:
    rows = ([cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines())
    return next(row for row in rows if row[:1] == [name])


def test_no_failure_and_kept_times_are_a_good_end() -> None:
    findings = {
        LOUD: Findings(5, [], {SILENCE: timed(0.1, 0.4)}),
        KILLS: Findings(2, [], {SILENCE: timed(9.0), FIRST_TOKEN: timed(1.0, 3.0)}),
    }
    assert verdict(findings, {}, 1.0) == []
    text = shown(findings)
    assert "broken" not in text
    assert cells(text, "loud") == ["loud", "2", "5", "0", "0.40", "", "kept"]
    assert cells(text, "kills") == ["kills", "1", "2", "0", "9.00", "first token 2.00 / 3.00", "kept"]
    assert cells(text, "server") == ["server", "7", "7", "9"]


def test_failures_are_told_by_kind_with_an_example_of_each() -> None:
    findings = {LOUD: Findings(9, ["route 1: 500", "route 2: 500", "torn"])}
    assert verdict(findings, {}, 1.0) == ["loud: 2 × route 1: 500", "loud: 1 × torn"]
    assert "broken" in shown(findings)


def test_more_kinds_than_are_shown_are_counted() -> None:
    findings = {LOUD: Findings(9, [f"failure of kind {letter}" for letter in "abcdefghij"])}
    assert verdict(findings, {}, 1.0)[-1] == "loud: 2 more kinds"


def test_a_slow_machine_is_allowed_more_and_both_figures_are_told() -> None:
    findings = {LOUD: Findings(1, [], {SILENCE: timed(0.9)})}
    assert verdict(findings, {}, 2.0) == []
    assert verdict(findings, {}, 1.5) == ["loud: silence, worst: 0.90 s, promised 0.5 s, allowed here 0.75 s"]
    assert "1.5 times those" in shown(findings, 1.5)


def test_a_leak_is_a_broken_promise() -> None:
    samples = [Memory(1, 100 * MEGABYTE)] * MIN_SAMPLES + [Memory(1, 190 * MEGABYTE)]
    assert verdict({}, {"server": samples}, 1.0) == ["memory of server: 90 MB more than at half"]


def test_each_attack_has_a_turn_before_any_has_a_second_one() -> None:
    assert next_attack([LOUD, KILLS], {}) is LOUD
    assert next_attack([LOUD, KILLS], {"loud": 0.1}) is KILLS
    assert next_attack([LOUD, KILLS], {"loud": 1.0, "kills": 2.9}) is KILLS
    assert next_attack([LOUD, KILLS], {"loud": 1.0, "kills": 3.1}) is LOUD


def test_whoever_names_attacks_gets_these_and_quiet_turns() -> None:
    assert {leg: [attack.name for attack in attacks] for leg, attacks in chosen_legs(["hubs", "stores"]).items()} == {
        "costs": ["quiet", "hubs"],
        "crashes": ["quiet", "stores"],
    }
    assert all(QUIET in attacks for attacks in chosen_legs([]).values())
    with pytest.raises(ValueError, match="no attack is called bees; there are quiet, fuzz, bodies"):
        chosen_legs(["bees"])


def test_every_attack_has_a_name_of_its_own_and_every_leg_a_share() -> None:
    names = [attack.name for attacks in LEGS.values() for attack in attacks if attack is not QUIET]
    assert len(set(names)) == len(names)
    assert list(SHARES) == list(LEGS)
    assert sum(SHARES.values()) == pytest.approx(1.0)
