"""`GET /health/live`: the event loop runs. `GET /health/ready`, `GET /health`: a request would be taken now. No key."""

from fastapi import APIRouter, Request

from app.core.errors import ModelUnavailable
from app.serving.context import context_of

router = APIRouter()


@router.get("/health/live")
async def get_live() -> dict[str, str]:
    """Always 200 while the server process answers."""
    return {"status": "live"}


@router.get("/health")
@router.get("/health/ready")
async def get_ready(request: Request) -> dict[str, str]:
    """200, or 503 with the reason in `error.message`."""
    context = context_of(request)
    if context.activity.draining:
        raise ModelUnavailable("Paceline is shutting down.", code="shutting_down", retry_after_seconds=5)
    if not context.worker.ready:
        restarts = context.worker.restarts
        reason = "The model worker is starting." if restarts == 0 else "The model worker ended and is being restarted."
        raise ModelUnavailable(reason, code="worker_not_ready", retry_after_seconds=context.worker.retry_after_seconds)
    return {"status": "ready"}
