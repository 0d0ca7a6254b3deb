"""A new drafter needs only one class in one file, and a name."""

import random
from collections.abc import Sequence

import mlx.core as mx

from app.core.reason import NO_REASON, Reason
from app.core.request import Request, SamplingParameters
from app.core.step import DecodeRow
from app.engine.drafters.drafter import Drafter, Observation, Proposal
from app.engine.sampling.drawing import SampledRow
from tests.engine.driving import Driver, build, naive
from tests.tiny import tiny_model


class Echo(Drafter):
    """Drafts the last token again and again, at most one time more than the last step accepted."""

    name = "echo"

    def __init__(self) -> None:
        self.courage = 1

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        counts = tuple(min(row.num_draft_tokens, self.courage) for row in rows)
        if not any(counts):
            return Proposal.none((Reason("no_match"),) * len(rows))
        tokens = [[row.tokens[-1]] * max(counts) for row in rows]
        return Proposal(mx.array(tokens, dtype=mx.int32), counts, (NO_REASON,) * len(rows))

    def observe(self, outcome: Observation) -> None:
        if any(outcome.drafted):
            self.courage = 1 + max(outcome.accepted)


def test_a_drafter_of_thirty_lines_runs_and_stays_exact() -> None:
    model, sampling = tiny_model("qwen3"), SamplingParameters(temperature=0.0)
    driver = Driver(build(model, features={"echo": Echo()}), random.Random(1), ("echo",))
    for name, prompt in {"a": (5, 5, 5, 5), "b": tuple(range(30))}.items():
        driver.admit(Request(id=name, prompt_tokens=prompt, max_tokens=20, sampling=sampling))
    while driver.live:
        driver.step()
    for sequence in driver.finished.values():
        assert sequence.output == naive(model, sequence.request.prompt_tokens, 20, sampling)
