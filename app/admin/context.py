"""What the areas of the dashboard share: made once by `create_app`; each area adds the field of its part."""

from dataclasses import dataclass, field

from app.admin.download_tools import DownloadTools
from app.admin.live import LiveFeed
from app.admin.lockout import SetupToken
from app.admin.model_tools import ModelTools
from app.serving.context import Context
from app.serving.live_settings import LiveSettings
from app.serving.logs import LogRing
from app.serving.pace import Pace
from app.store.accounts import Accounts
from app.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """The collaborators of the dashboard's routes."""

    serving: Context
    store: Store
    settings: LiveSettings
    live: LiveFeed
    accounts: Accounts
    setup: SetupToken
    models: ModelTools
    downloads: DownloadTools
    logs: LogRing
    pace: Pace = field(default_factory=Pace)
