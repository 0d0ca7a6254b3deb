"""Requests as JSON: one that runs, with its phase and how far it is, and one that ended, in one line or in full."""

from typing import Any

from app.core.past import Past
from app.core.reason import reason_object
from app.serving.record import Record
from app.worker.client import WorkerClient


class RequestView:
    """Reads records beside what the worker told of its models."""

    def __init__(self, worker: WorkerClient) -> None:
        self._worker = worker

    def running(self, record: Record) -> dict[str, Any]:
        """A request that runs. `progress` is a share of its phase, None where nobody knows."""
        asked = record.asked
        phase, progress, read_tokens = self._phase(record)
        return {
            "id": asked.id,
            "endpoint": asked.endpoint,
            "model": asked.model_id,
            "key": asked.key_name,
            "started_at": asked.created_at,
            "phase": phase,
            "progress": progress,
            "choices": asked.choices,
            "prompt_tokens": record.prompt_tokens,
            "read_tokens": read_tokens,
            "completion_tokens": record.tokens,
            "max_tokens": asked.max_tokens,
            "tokens_per_second": record.tokens_per_second,
            "method": record.method,
            "drafted": record.drafted,
            "acceptance": record.acceptance,
            **reason_object(record.why_not_drafted),
            "seconds": record.elapsed_seconds,
        }

    def running_in_full(self, record: Record) -> dict[str, Any]:
        """The same with every number so far."""
        return {**self.running(record), "figures": record.figures(), "prompt": None, "reply": None}

    def _phase(self, record: Record) -> tuple[str, float | None, int]:
        if record.writes:
            limit = record.asked.max_tokens
            return "decode", min(1.0, record.tokens / limit) if limit else None, record.prompt_tokens
        if not record.is_accepted:
            loading = self._worker.progress.get(record.asked.model_id)
            return ("queued", None, 0) if loading is None else ("loading", round(loading.fraction, 3), 0)
        read_tokens = self._read_tokens(record)
        if read_tokens is None:
            return "queued", None, 0
        share = min(1.0, read_tokens / record.prompt_tokens) if record.prompt_tokens else None
        return "prefill", share, read_tokens

    def _read_tokens(self, record: Record) -> int | None:
        """How much of its prompts is read; None: it has no row yet. The worker tells about once a second."""
        model = next((each for each in self._worker.snapshot.models if each.id == record.asked.model_id), None)
        if model is None:
            return None
        first_choices = [f"{command.id}#0" for command in record.asked.commands]
        found = [model.reading[name] for name in first_choices if name in model.reading]
        return sum(found) if found else None


def past_object(past: Past) -> dict[str, Any]:
    """A request that ended, in one line. What another version wrote, or left out, is nothing."""
    figures = past.figures
    speculation, seconds = figures.get("speculation", {}), figures.get("seconds", {})
    drafted = speculation.get("drafted", 0)
    total_seconds = seconds.get("total", 0.0)
    return {
        "id": past.id,
        "endpoint": past.endpoint,
        "model": past.model_id,
        "key": past.key_name,
        "started_at": past.created_at,
        "ended_at": past.created_at + total_seconds,
        "phase": "done",
        "outcome": past.outcome,
        "prompt_tokens": figures.get("usage", {}).get("prompt_tokens", 0),
        "completion_tokens": figures.get("usage", {}).get("completion_tokens", 0),
        "tokens_per_second": round(figures.get("timings", {}).get("predicted_per_second", 0.0), 1),
        "method": speculation.get("method", "off"),
        "drafted": drafted,
        "acceptance": round(speculation.get("accepted", 0) / drafted, 3) if drafted else None,
        **{name: speculation.get(name) for name in ("reason", "reason_code", "reason_values")},
        "seconds": total_seconds,
    }


def past_in_full(past: Past) -> dict[str, Any]:
    """The same with every number, and the texts where they are kept."""
    return {**past_object(past), "figures": past.figures, "prompt": past.prompt, "reply": past.reply}
