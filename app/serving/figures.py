"""The numbers of a request as answers, history and pages show them: usages added up, timings, speculation."""

from collections.abc import Sequence
from typing import Any

from app.core.reason import NO_REASON, Reason, reason_object
from app.core.step import MethodStatistics, Statistics, added_positions


def method_of(usage: Statistics) -> str:
    """The methods that drafted, joined by `+`; `off` when none did."""
    return "+".join(method for method in usage.methods if method != "off") or "off"


def add_usages(usages: Sequence[Statistics], *, choices_per_prompt: int = 1) -> Statistics:
    """The usage of a whole request; the prompt of `choices_per_prompt` neighbours counts once.

    Times are the longest of any choice, because choices run side by side.
    """
    first_of_prompts = usages[::choices_per_prompt]
    return Statistics(
        prompt_tokens=sum(usage.prompt_tokens for usage in first_of_prompts),
        cached_tokens=sum(usage.cached_tokens for usage in first_of_prompts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        queue_seconds=max((usage.queue_seconds for usage in usages), default=0.0),
        prefill_seconds=max((usage.prefill_seconds for usage in usages), default=0.0),
        decode_seconds=max((usage.decode_seconds for usage in usages), default=0.0),
        first_token_seconds=min((usage.first_token_seconds for usage in usages), default=0.0),
        by_method=_add_methods([each for usage in usages for each in usage.by_method]),
        reason=next((usage.reason for usage in usages if usage.reason), NO_REASON),
        decision=next((usage.decision for usage in usages if usage.decision), None),
    )


def _add_methods(statistics: Sequence[MethodStatistics]) -> tuple[MethodStatistics, ...]:
    """One entry for each method. Counts add up; seconds are the longest, because choices run side by side."""
    names = dict.fromkeys(each.method for each in statistics)
    return tuple(_add_method([each for each in statistics if each.method == name]) for name in names)


def _add_method(statistics: Sequence[MethodStatistics]) -> MethodStatistics:
    return MethodStatistics(
        method=statistics[0].method,
        steps=sum(each.steps for each in statistics),
        drafted=sum(each.drafted for each in statistics),
        accepted=sum(each.accepted for each in statistics),
        accepted_per_position=added_positions(each.accepted_per_position for each in statistics),
        draft_seconds=max(each.draft_seconds for each in statistics),
        verify_seconds=max(each.verify_seconds for each in statistics),
        rewind_seconds=max(each.rewind_seconds for each in statistics),
    )


def timings_object(usage: Statistics) -> dict[str, Any]:
    """llama.cpp's `timings`: `prompt_n` counts what was computed, `cache_n` what the prefix cache held.

    `predicted_ms` is made of drafting, verifying (plain forwards included), rewinding and the host's rest.
    """
    prompt_n = usage.prompt_tokens - usage.cached_tokens
    draft_seconds = sum(each.draft_seconds for each in usage.by_method)
    verify_seconds = sum(each.verify_seconds for each in usage.by_method)
    rewind_seconds = sum(each.rewind_seconds for each in usage.by_method)
    host_seconds = max(0.0, usage.decode_seconds - draft_seconds - verify_seconds - rewind_seconds)
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
        "draft_ms": _milliseconds(draft_seconds),
        "verify_ms": _milliseconds(verify_seconds),
        "rewind_ms": _milliseconds(rewind_seconds),
        "host_ms": _milliseconds(host_seconds),
        "queue_ms": _milliseconds(usage.queue_seconds),
        "first_token_ms": _milliseconds(usage.first_token_seconds),
    }


def speculation_object(usage: Statistics, unavailable: str = "") -> dict[str, Any]:
    """Which method ran and what came of it; `reason` says why speculation did not run, or not all the time.

    `decision` is the governor's last one, with its numbers; `methods` counts by method.
    """
    decision = usage.decision
    return {
        "method": method_of(usage),
        **reason_object(usage.reason or unavailable_reason(unavailable)),
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
        "cycles": usage.cycles,
        "tokens_per_cycle": round(1 + usage.accepted / usage.cycles, 3) if usage.cycles else 1.0,
        "accepted_per_position": list(usage.accepted_per_position),
        "methods": {
            each.method: {
                "cycles": each.steps,
                "drafted": each.drafted,
                "accepted": each.accepted,
                "accepted_per_position": list(each.accepted_per_position),
            }
            for each in usage.by_method
        },
    }


def unavailable_reason(text: str) -> Reason:
    """Why no drafter came with the model, if there is a text that says so."""
    return Reason("drafters", {"detail": text}) if text else NO_REASON


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
