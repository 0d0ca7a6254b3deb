"""What may enter the queue of one model. A request that is refused here was never accepted; nothing is to be undone."""

from app.core.errors import InvalidRequest, SpeculationUnavailable, context_overflow
from app.core.ports import EngineLimits
from app.core.request import Request


def check_request(request: Request, *, limits: EngineLimits, policy: str) -> None:
    """Raise `InvalidRequest` when the request cannot run here, `SpeculationUnavailable` when its method cannot."""
    length, room = len(request.prompt_tokens), limits.max_context_tokens
    if not length:
        raise InvalidRequest("the prompt is empty; send at least one token", code="empty_prompt")
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", parameter="max_tokens")
    if length + 1 > room:
        raise context_overflow(length, room)
    _check_speculation(request, limits=limits, policy=policy)


def _check_speculation(request: Request, *, limits: EngineLimits, policy: str) -> None:
    """A method that is asked for by name runs or is refused; only `auto` may fall back."""
    wish = request.speculation
    if wish.num_draft_tokens is not None and wish.num_draft_tokens < 0:
        raise InvalidRequest("num_draft_tokens must not be negative", parameter="num_draft_tokens")
    named = {"auto": wish.methods, "off": ()}.get(wish.method, (wish.method,))
    if named and (wish.policy or policy) == "off":
        raise SpeculationUnavailable(
            f"speculation is switched off for this model (policy 'off'), so {' and '.join(named)} cannot run"
        )
    for method in named:
        if method not in limits.drafters:
            reason = limits.unavailable.get(method, f"{method} is not loaded with this model")
            raise SpeculationUnavailable(str(reason))
