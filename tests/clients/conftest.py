"""Two servers of the embedded models, one that drafts and one that never does: clients must get equal answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.serving.conftest import Server, running

MODEL = "demo-assistant"
DRAFTERS = f"{MODEL}={MODEL}-dflash+{MODEL}-eagle3+demo-draft"
METHODS = ("dflash", "eagle3", "draft_model", "ngram")
Told = TypeVar("Told")
Both = Callable[[Callable[[str], Told]], Told]


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("system") is None:
        item.add_marker(pytest.mark.system("clients of others"))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    def home(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    with (
        running(home("drafts"), PACELINE_POLICY="auto", PACELINE_DRAFTS=DRAFTERS) as drafts,
        running(home("plain"), PACELINE_POLICY="off") as plain,
    ):
        yield drafts, plain


@pytest.fixture(scope="session")
def both(servers: tuple[Server, Server]) -> Iterator[Both[object]]:
    """Yield a function that calls a client with each server's URL, asserts equal results, and returns them."""

    def talk(client: Callable[[str], object]) -> object:
        with_drafts, without = (client(server.url) for server in servers)
        assert with_drafts == without
        return with_drafts

    yield talk
    drafts, plain = servers
    accepted = "paceline_spec_decode_num_accepted_tokens_total"
    assert drafts.metric(accepted) > 0
    assert plain.metric(accepted) == 0
