"""Whether a model fits into memory: what is refused for good, and what only until somebody lets go."""

from collections.abc import Collection

from app.core.errors import InsufficientMemory
from app.engine import memory
from app.engine.resident import Resident

RETRY_AFTER_SECONDS = 5
"""When to come back for memory or a draft that running requests hold."""


def check_room(
    model_id: str, needed: int, *, ceiling_bytes: int, others: Collection[Resident], pinned: Collection[str]
) -> None:
    """Refuse what cannot fit even with every idle unit gone; told apart is whether waiting helps."""
    needs = f"{model_id} needs {_gigabytes(needed)}"
    ceiling = f"the ceiling is {_gigabytes(ceiling_bytes)}"
    if needed > ceiling_bytes:
        raise InsufficientMemory(f"{needs}, {ceiling}: choose a smaller model or raise {memory.LIMIT_VARIABLE}")
    held = sum(entry.working_bytes for entry in others if entry.spec.id in pinned)
    if held + needed > ceiling_bytes:
        reason = f"{ceiling} and pinned models hold {_gigabytes(held)}"
        raise InsufficientMemory(f"{needs}, {reason}: unpin one or raise {memory.LIMIT_VARIABLE}")
    held += sum(entry.working_bytes for entry in others if entry.leases and entry.spec.id not in pinned)
    if held + needed > ceiling_bytes:
        reason = f"{ceiling} and models in use hold {_gigabytes(held)}"
        message = f"{needs}, {reason}: retry when their requests have finished"
        raise InsufficientMemory(message, retry_after_seconds=RETRY_AFTER_SECONDS)


def never_fits(tokens: int, needed: int, held: int, ceiling_bytes: int) -> str:
    """Why a request is refused for good, and what to do."""
    left = max(0, ceiling_bytes - held)
    return (
        f"prompt and expected answer are {tokens} tokens, whose keys and values take {_gigabytes(needed)}; beside the "
        f"weights {_gigabytes(left)} of {_gigabytes(ceiling_bytes)} are left: shorten the prompt, lower max_tokens or "
        f"raise {memory.LIMIT_VARIABLE}"
    )


def _gigabytes(size: int) -> str:
    return f"{size / memory.GIGABYTE:.1f} GB" if size >= memory.GIGABYTE // 2 else f"{size / 10**6:.0f} MB"
