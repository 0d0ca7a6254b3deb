"""The check of package sizes: it counts lines, and fails if a package is over its budget by more than a tenth."""

import pytest

from tools import sizes


def test_every_package_has_a_budget() -> None:
    assert sizes.package_lines().keys() == sizes.BUDGETS.keys()


@pytest.mark.parametrize(("ratio", "status"), [(1.09, 0), (1.11, 1)])
def test_a_package_a_tenth_above_its_budget_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ratio: float, status: int
) -> None:
    lines = sizes.package_lines()
    monkeypatch.setattr(sizes, "BUDGETS", {name: int(count / ratio) for name, count in lines.items()})
    assert sizes.main() == status
    assert ("above its budget" in capsys.readouterr().out) == bool(status)


def test_a_package_without_a_budget_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "BUDGETS", sizes.BUDGETS | {"engine": 0})
    assert sizes.main() == 1
