"""Every page of the app, for the tests that visit all of them and for the screenshots."""

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
        """Return the page's address on a server; the request with the highest acceptance rate stands for all."""
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
"""Page that exists only while there is no account."""
ENTER = Place("enter", "/admin/enter", "/admin/enter", signed_in=False)
"""Page that needs a one-time code; `tests/browser/test_entry.py` opens it."""
