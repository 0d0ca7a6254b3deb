"""A failure to count a request never fails the request: here the journal and the metrics raise at every call."""

from typing import Any

import pytest

from app.core.errors import QueueFull
from app.serving.journal import Journal
from app.serving.metrics import Metrics
from tests.api.fakes import Site, failing

pytestmark = pytest.mark.anyio


def fails(*_arguments: Any, **_options: Any) -> Any:
    raise KeyError("a fault of ours")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("owner", "names"),
    [(Journal, ("begun", "ended", "log_notices")), (Metrics, ("accepted", "emitted", "finished"))],
)
async def test_an_answer_is_whole_whatever_fails_to_count_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, owner: type, names: tuple[str, ...], stream: bool
) -> None:
    wanted = (await site.chat(stream=stream, seed=1)).text
    for name in names:
        monkeypatch.setattr(owner, name, fails)
    answer = await site.chat(stream=stream, seed=1)
    assert answer.status_code == 200
    assert answer.text.count("Hello") == wanted.count("Hello") > 0
    assert answer.text.endswith("data: [DONE]\n\n") == stream
    site.worker.script = failing(QueueFull("too many", retry_after_seconds=1))
    assert (await site.chat()).status_code == 429
    assert len(site.context.activity) == 0
