"""A Python that cannot run Paceline is named before anything is installed, with advice on where to get another."""

import pytest

from tools.python import complaint


@pytest.mark.parametrize(
    ("version", "system", "machine", "macos", "said"),
    [
        ((3, 9), "Darwin", "arm64", "15.5", "this is 3.9: install one from python.org"),
        ((3, 12), "Darwin", "x86_64", "15.5", "made for Intel"),
        ((3, 12), "Darwin", "arm64", "13.6", "this is 13.6: update macOS"),
        ((3, 14), "Darwin", "arm64", "26.2", ""),
        ((3, 11), "Linux", "x86_64", "", ""),
    ],
)
def test_a_python_that_cannot_run_it_is_named(
    version: tuple[int, int], system: str, machine: str, macos: str, said: str
) -> None:
    text = complaint(version, system, machine, macos)
    assert said in text
    assert bool(text) == bool(said)
