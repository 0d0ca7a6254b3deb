"""Every page that there is, as the sweeps and the screenshots visit them."""

from dataclasses import dataclass

from tests.browser.server import MODEL, Server


@dataclass(frozen=True)
class Place:
    """One page: its name, its address, and the template of its route."""

    name: str
    path: str
    route: str
    signed_in: bool = True

    def address(self, server: Server) -> str:
        """Where it is on a server; one request stands for all of them, the latest with drafts."""
        if "{request}" not in self.path:
            return self.path
        requests = server.call("GET", "/admin/api/requests")["requests"]
        return self.path.format(request=max(requests, key=lambda request: request["acceptance"] or 0)["id"])


PLACES = (
    Place("overview", "/admin/", "/admin/"),
    Place("models", "/admin/models", "/admin/models"),
    Place("drafts", f"/admin/drafts/{MODEL}", "/admin/drafts/{model_id:path}"),
    Place("pays", f"/admin/pays/{MODEL}", "/admin/pays/{model_id:path}"),
    Place("model", f"/admin/models/{MODEL}", "/admin/models/{model_id:path}"),
    Place("chat", "/admin/chat", "/admin/chat"),
    Place("downloads", "/admin/downloads", "/admin/downloads"),
    Place("requests", "/admin/requests", "/admin/requests"),
    Place("request", "/admin/requests/{request}", "/admin/requests/{request_id}"),
    Place("logs", "/admin/logs", "/admin/logs"),
    Place("settings", "/admin/settings", "/admin/settings"),
    Place("connect", "/admin/connect", "/admin/connect"),
    Place("welcome", "/admin/welcome?step=folders", "/admin/welcome"),
    Place("welcome-models", "/admin/welcome?step=models", "/admin/welcome"),
    Place("login", "/admin/login", "/admin/login", signed_in=False),
)
SET_UP = Place("setup", "/admin/setup", "/admin/setup", signed_in=False)
"""It exists only as long as there is no account."""
ENTER = Place("enter", "/admin/enter", "/admin/enter", signed_in=False)
"""It is used with a code only: `tests/browser/test_entry.py` does."""
