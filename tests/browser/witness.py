"""Sees what a page must not do: complain, break its policy, lose a request, speak to another host, open a dialog."""

from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Page, Request, Response

WATCH_POLICY = """
addEventListener("securitypolicyviolation", (event) => {
  console.error(`policy violation: ${event.effectiveDirective} ${event.blockedURI} ${event.sample}`);
});
"""
ABORTED = "net::ERR_ABORTED"
"""A page that is left drops its live feed; that is no loss."""
REFUSED = "Failed to load resource"
"""What the console says of each answer from 400 on; those are looked at themselves."""


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
        """These answers belong to the test."""
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
    """Until scripts run and the page waits for nothing; the live feed never ends and does not count."""
    page.wait_for_load_state("load")
    page.wait_for_function(SETTLED)


SETTLED = """() => {
  const visible = (node) => node.checkVisibility({ visibilityProperty: true });
  return document.readyState === "complete"
    && document.querySelector("[x-cloak]:not([hidden])") === null
    && ![...document.querySelectorAll(".skeleton, [aria-busy=true]")].some(visible);
}"""
