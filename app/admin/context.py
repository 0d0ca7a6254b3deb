"""Context of the dashboard's routes: made once by `admin_context` in `app/main.py`, and passed to each route."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from app.admin.downloading import Downloads
from app.admin.feed import LiveFeed
from app.admin.loading import Loading
from app.admin.measuring import Measuring
from app.admin.model_view import ModelView
from app.admin.templating import Pages
from app.admin.updates import Updates
from app.serving.context import Context
from app.serving.guessing import Lockout, OneTimeCodes
from app.serving.logs import LogRing
from app.serving.metrics import Pace
from app.store.accounts import Accounts
from app.store.conversations import Conversations
from app.store.rows import RequestHistory, StoredMeasurements
from app.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """The collaborators of the dashboard's routes."""

    serving: Context
    store: Store
    pages: Pages
    feed: LiveFeed
    accounts: Accounts
    setup_codes: OneTimeCodes
    entry_codes: OneTimeCodes
    """One-time codes for commands on this computer; each code opens one page in a browser and signs it in."""
    lockout: Lockout
    models: ModelView
    loading: Loading
    measuring: Measuring
    stored_measurements: StoredMeasurements
    history: RequestHistory
    conversations: Conversations
    downloads: Downloads
    updates: Updates
    logs: LogRing
    pace: Pace = field(default_factory=Pace)
    restart: Callable[[], None] | None = None
    """Callback that stops the server and starts it again with the same command line; None: it cannot be restarted."""


async def admin_of(request: Request) -> AdminContext:
    """Return the context of the application that serves `request`."""
    context: AdminContext = request.app.state.admin
    return context


Admin = Annotated[AdminContext, Depends(admin_of)]
