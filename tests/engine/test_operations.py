"""Operations that a step adds to those of its bare forwards, in the form for a GPU: each is a kernel launch."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.core.request import Request, SamplingParameters
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine.engine import Engine
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.engine.probe import finished
from app.models.footprint import SHARED_TOKENS
from tests.tiny import write_tiny_model

VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unflatten"}
"""Operations that only make a view of an array and launch no kernel."""
GREEDY = SamplingParameters(temperature=0.0)
TOP_P = SamplingParameters(temperature=0.7, top_p=0.9, seed=1)
STEPS = 6
MODULES = ("app.engine.sampling.truncation", "app.engine.sampling.drawing")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sampling take its GPU branches."""
    for module in MODULES:
        monkeypatch.setattr(f"{module}.on_cpu", lambda: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


def arrays(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [array for inner in values for array in arrays(inner)]


@contextmanager
def counted(path: Path) -> Iterator[Counter[str]]:
    """Count the operations that are evaluated inside the block, by name."""
    counts: Counter[str] = Counter()

    def counting(evaluate: Callable[..., None]) -> Callable[..., None]:
        def count(*values: Any) -> None:
            if evaluated := arrays(values):
                mx.export_to_dot(str(path), *evaluated)
                counts.update(re.findall(r'\[label ="(\w+)"', path.read_text()))
                evaluate(*evaluated)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, counting(getattr(mx, name)))
        yield counts


def kernels(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name not in VIEWS)


def opened(folder: Path, *, drafts: bool = False) -> Engine:
    drafters = (DrafterSpecification(id="draft", path=str(folder), method="draft_model"),) if drafts else ()
    model = ModelSpecification(id="tiny", path=str(folder), max_rows=4, drafters=drafters)
    engine = open_engine(finished(load_unit(model)))
    assert isinstance(engine, Engine)
    return engine


def bare(model: nn.Module, path: Path, *, rows: int = 1, width: int = 1) -> int:
    """Return the number of kernels of mlx-lm's own forward after a prompt, over its own caches."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]] * rows), cache=caches), [cache.state for cache in caches])
    with counted(path) as counts:
        mx.eval(model(mx.array([[4] * width] * rows), cache=caches), [cache.state for cache in caches])
    return kernels(counts)


def decoded(
    engine: Engine, sampling: SamplingParameters, path: Path, *, rows: int = 1, prompt: int = 9, drafts: int = 0
) -> tuple[int, list[list[int]]]:
    """Return the number of kernels of the last of several equal steps, and the texts."""
    texts, computed = (
        {f"r{row}": [1 + (7 * place + row) % 50 for place in range(prompt + row)] for row in range(rows)},
        {},
    )
    for name, tokens in texts.items():
        engine.admit(Request(id=name, prompt_tokens=tuple(tokens), max_tokens=200, sampling=sampling))
        computed[name] = len(tokens) - 1
        engine.step(PrefillStep((PrefillRow(name, tokens, 0, len(tokens) - 1),)))
    for _ in range(STEPS):
        plan = DecodeStep(
            tuple(
                DecodeRow(
                    sequence_id=name,
                    tokens=tokens,
                    prompt_length=prompt + row,
                    computed=computed[name],
                    remaining=100,
                    method="draft_model" if drafts else "off",
                    num_draft_tokens=drafts,
                )
                for row, (name, tokens) in enumerate(texts.items())
            )
        )
        with counted(path) as counts:
            result = engine.step(plan)
        for outcome in result.outcomes:
            texts[outcome.sequence_id].extend(outcome.emitted)
            computed[outcome.sequence_id] = outcome.computed
    for name in texts:
        engine.release(name, ())
    return kernels(counts), list(texts.values())


@pytest.mark.parametrize(("sampling", "most"), [(GREEDY, 5), (TOP_P, 30)], ids=["greedy", "top-p"])
def test_a_plain_step_adds_few_operations(
    folder: Path, tmp_path: Path, sampling: SamplingParameters, most: int
) -> None:
    engine = opened(folder)
    added = decoded(engine, sampling, tmp_path / "graph")[0] - bare(engine.runner.model, tmp_path / "graph")
    assert 0 < added <= most


def test_a_cycle_of_four_drafts_with_top_p_adds_few_operations(folder: Path, tmp_path: Path) -> None:
    engine, path = opened(folder, drafts=True), tmp_path / "graph"
    model = engine.runner.model
    forwards = bare(model, path, width=5) + 4 * bare(model, path)
    assert 0 < decoded(engine, TOP_P, path, drafts=4)[0] - forwards <= 130


def test_four_long_rows_with_buffers_of_their_own_add_eighteen_operations_a_layer(folder: Path, tmp_path: Path) -> None:
    engine, path = opened(folder), tmp_path / "graph"
    layers = len(make_prompt_cache(engine.runner.model))
    added = decoded(engine, GREEDY, path, rows=4, prompt=SHARED_TOKENS + 1)[0] - bare(engine.runner.model, path, rows=4)
    assert 0 < added <= 7 + 18 * layers


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_gpu_draws_the_tokens_that_a_cpu_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    engine = opened(folder, drafts=True)
    on_gpu = decoded(engine, TOP_P, tmp_path / "graph", drafts=drafts, rows=2)[1]
    for module in MODULES:
        monkeypatch.setattr(f"{module}.on_cpu", lambda: True)
    assert decoded(engine, TOP_P, tmp_path / "graph", drafts=drafts, rows=2)[1] == on_gpu
