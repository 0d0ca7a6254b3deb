"""Watch for what a page must not do: log errors, violate its policy, lose requests, call other hosts, open dialogs."""

from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Page, Request, Response

WATCH_POLICY = """
addEventListener("securitypolicyviolation", (event) => {
  console.error(`policy violation: ${event.effectiveDirective} ${event.blockedURI} ${event.sample}`);
});
"""
ABORTED = "net::ERR_ABORTED"
"""Failure of a request that a page dropped when it was left, such as its live feed; not counted as lost."""
REFUSED = "Failed to load resource"
"""Start of the console's message for each status from 400 on; ignored, since `_see_response` checks the answers."""


class Witness:
    """Watches every page of a context; `problems` is empty as long as all is well."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.problems: list[str] = []
        self.is_offline = False
        self._address = address
        self._expected: set[int] = set()
        context.add_init_script(WATCH_POLICY)
        context.on("console", self._on_event)
        context.on("weberror", lambda error: self.problems.append(f"error of a script: {error.error}"))
        context.on("request", self._see_request)
        context.on("response", self._see_response)
        context.on("requestfailed", self._see_failure)
        context.on("page", lambda page: page.on("dialog", self._see_dialog))

    def expects(self, *statuses: int) -> None:
        """Accept answers with these statuses, since the test causes them."""
        self._expected |= set(statuses)

    def _on_event(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning", "assert"} and not message.text.startswith(REFUSED):
            self.problems.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _see_request(self, request: Request) -> None:
        if not request.url.startswith((f"{self._address}/", "data:", "blob:", "about:")):
            self.problems.append(f"another host: {request.url}")

    def _see_response(self, response: Response) -> None:
        if response.status >= 400 and response.status not in self._expected:
            self.problems.append(f"{response.status} for {response.request.method} {response.url}")

    def _see_failure(self, request: Request) -> None:
        if request.failure != ABORTED and not self.is_offline:
            self.problems.append(f"lost: {request.method} {request.url}: {request.failure}")

    def _see_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"a script opened a dialog: {dialog.message}")
        dialog.dismiss()


def is_settled(page: Page) -> None:
    """Wait until scripts run and the page waits for nothing but the live feed, which never ends."""
    page.wait_for_load_state("load")
    page.wait_for_function(SETTLED)


SETTLED = """() => {
  const visible = (node) => node.checkVisibility({ visibilityProperty: true });
  return document.readyState === "complete"
    && !document.body.hasAttribute("data-starting")
    && document.querySelector("[x-cloak]:not([hidden])") === null
    && ![...document.querySelectorAll(".skeleton, [aria-busy=true]")].some(visible);
}"""
