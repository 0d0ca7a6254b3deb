"""Embeddings from a model that also decodes: the same vector whatever other requests run."""

from collections.abc import Mapping

import numpy as np
import pytest

from app.core.request import Request, SamplingParameters, SpeculationRequest
from app.engine.engine import Engine
from app.scheduler.scheduler import Scheduler
from tests.engine.driving import build
from tests.engine.schedules import models

GREEDY = SamplingParameters(temperature=0.0)
PROMPTS = {
    f"{pooling} {size}": [7 * place % 97 for place in range(size)]
    for pooling in ("mean", "last")
    for size in (1, 2, 17, 40)
}


def embeddings(engine: Engine, *, beside: Request | None = None) -> Mapping[str, tuple[float, ...]]:
    """Return the vectors of all prompts, which are submitted once drafts of `beside` have been verified."""
    scheduler = Scheduler(engine.limits, policy="auto")
    requests = [
        Request(id=name, prompt_tokens=tuple(prompt), max_tokens=1, embeds=name.split()[0])
        for name, prompt in PROMPTS.items()
    ]
    waiting, vectors, verified = list(requests), dict[str, tuple[float, ...]](), 0
    for request in [beside] if beside else []:
        scheduler.submit(request)
    while scheduler.has_work or waiting:
        if beside is None or verified:
            for request in waiting:
                scheduler.submit(request)
            waiting = []
        while (head := scheduler.next_admission()) is not None:
            scheduler.admitted(head.id, engine.admit(head))
        plan = scheduler.plan()
        for event in scheduler.commit(engine.step(plan)) if plan else ():
            verified += event.drafted
            if event.embedding:
                vectors[event.request_id] = event.embedding
        for name, kept in scheduler.drain_released():
            engine.release(name, kept)
    return vectors


@pytest.mark.parametrize("family", ["qwen3", "mamba2", "gemma3"])
def test_a_neighbour_that_drafts_changes_no_embedding(family: str) -> None:
    target, draft = models(family, False)
    alone = embeddings(build(target, draft=draft))
    speculation = SpeculationRequest(method="draft_model", num_draft_tokens=3)
    beside = Request(
        id="beside", prompt_tokens=(3, 1, 4, 1, 5), max_tokens=60, sampling=GREEDY, speculation=speculation
    )
    together = embeddings(build(target, draft=draft), beside=beside)
    assert together.keys() == alone.keys() == PROMPTS.keys()
    for name, vector in alone.items():
        assert np.allclose(together[name], vector, atol=1e-4), name
