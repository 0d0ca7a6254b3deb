"""The table in `docs/models.md`, made by a walk through every family; `python -m tests.engine.families` updates it and
takes some 50 s of processor time."""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from app.core.errors import ModelUnavailable
from app.engine.caches.rollback import UnknownCacheError
from app.engine.layers import Taps, Target
from app.engine.probe import open_runner
from app.models.config_values import text_part
from app.models.drafters.config import FINAL
from app.models.drafters.methods import FEATURE_METHODS, MTP, read_drafter
from tests.architecture.source import ROOT
from tests.engine.family_walk import Walk, walk
from tests.engine.tiny_families import NOT_MODELS, NOT_RUN, UNSOUND, configuration, families, family_model

PAGE = ROOT / "docs" / "models.md"
HEAD = "| Family | Batched | Undone by | Prefix cache | Drafts with |\n|---|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")
COUNTS = re.compile(r"<!-- counts -->\n(?:.+\n)*")
LARGEST_DISTANCE = 1e-4
"""Largest tolerated error of float32 logits, relative to the largest logit."""


def row_of(family: str) -> str:
    """Return the table row of one module of mlx-lm. Raises AssertionError if tokens or logits differ from mlx-lm's."""
    if family in NOT_MODELS:
        return f"| `{family}` | – | – | – | no model: {NOT_MODELS[family]} |\n"
    if family in NOT_RUN:
        return f"| `{family}` | ? | ? | ? | decided when it is loaded: {NOT_RUN[family]} |\n"
    model = family_model(family)
    if family in UNSOUND:
        with pytest.raises(UnknownCacheError):
            open_runner(model)
        return f"| `{family}` | one request at a time | – | no | nothing: {UNSOUND[family]} |\n"
    seen = walk(model)
    assert seen.wrong == [], f"other tokens in {seen.wrong}"
    assert seen.distance <= LARGEST_DISTANCE
    assert seen.compared >= 70
    return f"| `{family}` | {_batched(seen)} | {_undone(seen)} | {_cached(seen)} | {_methods(seen, family, model)} |\n"


def _batched(seen: Walk) -> str:
    if seen.engine.limits.max_rows == 1:
        return "one request at a time"
    assert seen.rows == seen.engine.limits.max_rows
    return "row by row" if seen.engine.runner.rows_isolated else "yes"


def _undone(seen: Walk) -> str:
    if not seen.engine.limits.drafters:
        return "–"
    assert seen.accepted > 0
    recorded = "scan again" if _replays(seen) else "carry over"
    words = {"trim": "trim", "slice": "slice", "snapshot": recorded}
    return " + ".join(words[family] for family in seen.engine.runner.caches.families)


def _replays(seen: Walk) -> bool:
    """Return whether a rejected draft is undone by scanning the kept tokens again, not by carrying them over."""
    runner = seen.engine.runner
    if not runner.recordable:
        return False
    runner.claim("again")
    _, forward = runner.forward(["again"], mx.array([[1, 2, 3]]), [3], record=True)
    kept = runner.commit(forward, [2])
    runner.release("again")
    return kept == [2]


def _cached(seen: Walk) -> str:
    if not seen.cached:
        return "no"
    return "at checkpoints" if seen.engine.runner.caches.states else "any beginning"


def _methods(seen: Walk, family: str, model: nn.Module) -> str:
    if not seen.engine.limits.drafters:
        return "nothing"
    words = ["n-grams", "draft model"]
    if _is_readable(model, family):
        words += ["DFlash", "EAGLE-3"]
        words += ["MTP"] if _has_head(configuration(family)) else []
    return ", ".join(words)


def _is_readable(model: nn.Module, family: str) -> bool:
    """Return whether feature drafters find the hidden states, the embedding and the head that they read."""
    assert {"dflash", "eagle3", "mtp"} == set(FEATURE_METHODS)
    try:
        taps = Taps(model, (0, FINAL))
        target = Target(model, configuration(family), int(model_vocabulary(configuration(family))))
    except (ModelUnavailable, KeyError, StopIteration, AttributeError):
        return False
    logits: Any = model(mx.array([[1, 2, 3]]))
    caught = taps.take()
    if set(caught) != {0, FINAL} or target.embed(mx.array([[1]])).shape[-1] != caught[0].shape[-1]:
        return False
    final_logits = target.logits(caught[FINAL])
    return bool(mx.max(mx.abs(final_logits - logits[..., : final_logits.shape[-1]])) < 1e-3 * mx.max(mx.abs(logits)))


def _has_head(config: Mapping[str, Any]) -> bool:
    """Return whether models of this family are published with an MTP head that can run here."""
    if text_part(config).get("model_type") not in {"deepseek_v3", "qwen3_next", "qwen3_5"}:
        return False
    read_drafter(MTP.name, config, config)
    return True


def model_vocabulary(config: Mapping[str, Any]) -> int:
    """Return the vocabulary size of the text part."""
    text = config.get("text_config", config)
    return int(text.get("vocab_size") or config.get("vocab_size") or text.get("num_vocab"))


def counts(rows: list[str]) -> str:
    """Return the paragraph above the table."""
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    models = [row for row in cells if not row[4].startswith("no model")]
    drafting = sum("n-grams" in row[4] for row in models)
    together = sum(row[1] == "yes" for row in models)
    apart = sum(row[1] == "row by row" for row in models)
    single = sum(row[1] == "one request at a time" for row in models)
    unknown = sum(row[1] == "?" for row in models)
    readable = sum("EAGLE-3" in row[4] for row in models)
    return (
        f"<!-- counts -->\nOf {len(cells)} modules, {len(models)} are models. {drafting} of them draft,\n"
        f"{readable} also with drafters that read hidden states; {together} decode requests together, {apart} row by\n"
        f"row and {single} one at a time; {unknown} cannot run on every computer, and are tried when they are loaded.\n"
    )


def renewed(page: str, rows: list[str]) -> str:
    """Return the page with these rows in its table."""
    page = TABLE.sub(lambda _: HEAD + "".join(rows), page)
    return COUNTS.sub(lambda _: counts(rows), page)


if __name__ == "__main__":
    PAGE.write_text(
        renewed(PAGE.read_text(encoding="utf-8"), [row_of(family) for family in families()]), encoding="utf-8"
    )
