"""Figures of a request in answers and on pages: llama.cpp's `timings`, and `speculation`."""

from typing import Any

from app.core.reason import Reason, reason_object
from app.core.request import OFF
from app.core.statistics import Statistics


def timings_object(usage: Statistics) -> dict[str, Any]:
    """Return llama.cpp's `timings`: `prompt_n` counts prompt tokens computed, `cache_n` those from the cache.

    `predicted_ms` is the sum of drafting, verifying (plain forwards included), rewinding and the rest, `host_ms`.
    """
    prompt_n = usage.prompt_tokens - usage.cached_tokens
    draft_seconds = sum(counters.draft_seconds for counters in usage.by_method)
    verify_seconds = sum(counters.verify_seconds for counters in usage.by_method)
    rewind_seconds = sum(counters.rewind_seconds for counters in usage.by_method)
    parts_seconds = draft_seconds + verify_seconds + rewind_seconds
    # The last step continues after the last token is sent, so the parts may add up to more than the decode time.
    share = min(1.0, usage.decode_seconds / parts_seconds) if parts_seconds else 1.0
    host_seconds = max(0.0, usage.decode_seconds - parts_seconds)
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": _milliseconds(usage.prefill_seconds),
        "prompt_per_second": _rate(prompt_n, usage.prefill_seconds),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": _milliseconds(usage.decode_seconds),
        "predicted_per_second": _rate(usage.completion_tokens, usage.decode_seconds),
        "draft_n": usage.drafted,
        "draft_n_accepted": usage.accepted,
        "draft_rounds": usage.cycles,
        "draft_ms": _milliseconds(share * draft_seconds),
        "verify_ms": _milliseconds(share * verify_seconds),
        "rewind_ms": _milliseconds(share * rewind_seconds),
        "host_ms": _milliseconds(host_seconds),
        "queue_ms": _milliseconds(usage.queue_seconds),
        "first_token_ms": _milliseconds(usage.first_token_seconds),
        "preempted_n": usage.preemptions,
    }


def speculation_object(usage: Statistics, no_drafter: Reason) -> dict[str, Any]:
    """Return the method that ran and its results; `reason` says why speculation did not run, or not all the time.

    `no_drafter` is the reason if the worker gave none; `decision` is the governor's last decision, with its numbers.
    """
    decision, cycles = usage.decision, usage.cycles
    return {
        "method": "+".join(method for method in usage.methods if method != OFF) or OFF,
        **reason_object(usage.reason or no_drafter),
        "decision": decision
        and {
            "kind": decision.kind,
            "method": decision.method,
            "num_draft_tokens": decision.num_draft_tokens,
            "cost_ratio": round(decision.cost_ratio, 3),
            "acceptance": round(decision.acceptance, 3),
        },
        "drafted": usage.drafted,
        "accepted": usage.accepted,
        "cycles": cycles,
        "close_calls": usage.close_calls,
        "replayed_tokens": usage.replayed_tokens,
        "tokens_per_cycle": round(1 + usage.accepted / cycles, 3) if cycles else 1.0,
        "accepted_per_position": list(usage.accepted_per_position),
        "methods": {
            counters.method: {
                "cycles": counters.steps,
                "drafted": counters.drafted,
                "accepted": counters.accepted,
                "accepted_per_position": list(counters.accepted_per_position),
            }
            for counters in usage.by_method
        },
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
