"""`GET /metrics`: the server's counters in Prometheus text form."""

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.serving.context import context_of

router = APIRouter()


@router.get("/metrics")
async def get_metrics(request: Request) -> Response:
    """Everything measured since the server started."""
    context = context_of(request)
    return Response(context.measurements.expose(context.worker), media_type=CONTENT_TYPE_LATEST)
