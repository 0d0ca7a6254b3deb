"""A sweep as plain JSON values: the file of `paceline bench MODEL --json`, and what the store keeps. Pure."""

from collections.abc import Mapping
from typing import Any

from app.serving.sweep.grid import Cell
from app.serving.sweep.recommendation import Recommendation
from app.serving.sweep.turns import Point, Sweep


def sweep_results(
    sweep: Sweep,
    recommendation: Recommendation | None,
    *,
    model: str,
    drafts: Mapping[str, str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything but the machine and the versions, which the store keeps beside it; `drafts`: id by method."""
    return {
        "model": model,
        "drafts": list(drafts.values()),
        "methods": dict(drafts),
        "options": dict(options),
        "cells": [_cell_document(sweep, cell) for cell in sweep.cells()],
        "skipped": [cell.name for cell in sweep.skipped],
        "interrupted": sweep.interrupted,
        "recommendation": recommendation and {"text": recommendation.text, "choice": recommendation.choice.given()},
    }


def _cell_document(sweep: Sweep, cell: Cell) -> dict[str, Any]:
    return {
        "rows": cell.rows,
        "context": cell.context,
        "settings": [_point_document(sweep, point) for point in sweep.points_of(cell)],
    }


def _point_document(sweep: Sweep, point: Point) -> dict[str, Any]:
    return {
        "name": point.setting.name,
        "method": point.setting.method,
        "num_draft_tokens": point.setting.drafts,
        "used": point.method,
        "tokens_per_second": point.tokens_per_second,
        "to_plain": sweep.ratio(point),
        "gain": sweep.gain(point),
        "acceptance": point.acceptance,
        "tokens_per_cycle": point.tokens_per_cycle,
        "values": [point.turns[number].tokens_per_second for number in sorted(point.turns)],
    }
