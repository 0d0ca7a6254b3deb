"""A server that has been in use: a loaded model, a conversation, a measurement, an unfinished download, requests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect

from tests.admin.pseudo import write_pseudo_locale
from tests.browser.folders import write_huge_model
from tests.browser.server import MODEL, Server, serving
from tests.browser.visit import visiting
from tests.hub.queue import model_files
from tests.hub.stand_in import StandInHub, stand_in_hub

REPOSITORY = "mlx-community/Qwen3-4B-4bit"
QUESTION = "Count from 1 to 20."
QUICK = {"model": MODEL, "minutes": 0.05, "rounds": 1, "grid": "one"}
OWN_PROMPTS = (QUESTION, "Write a markdown table of the squares from 1 to 20.")
THOROUGH = {"model": MODEL, "minutes": 0.8, "rounds": 3, "grid": "several", "prompts": OWN_PROMPTS}
DOWNLOADED_BYTES = 700_000
ROWS = 200_000
LARGE_ROWS = 12_000_000


@dataclass(frozen=True)
class Scene:
    server: Server
    hub: StandInHub


@contextmanager
def scene(folder: Path, browser: Browser, *, is_under_way: bool = False) -> Iterator[Scene]:
    """Yield a server with everything that the pages can show. Its download stalls half-way, or goes on slowly.

    It goes on if `is_under_way`, as for screenshots. Otherwise, the pseudo-locale is one more language.
    """
    if not is_under_way:
        write_pseudo_locale(folder / "home")
    write_huge_model(folder / "models")
    with stand_in_hub() as hub:
        publish(hub, rows=LARGE_ROWS if is_under_way else ROWS)
        if is_under_way:
            hub.faults.pause_seconds = 0.03
        else:
            hub.faults.stalls.extend([DOWNLOADED_BYTES] * 100)  # only the weights are larger, so nothing else stalls
        environment = {"PACELINE_MODEL_DIRS": str(folder / "models"), "PACELINE_HUB_ENDPOINT": hub.address}
        with serving(folder, **environment) as server:
            furnish(server, browser, THOROUGH if is_under_way else QUICK)
            yield Scene(server, hub)


def publish(hub: StandInHub, rows: int) -> None:
    """Add repositories to the hub for searches; the first one is also downloaded."""
    files = model_files(rows)
    hub.add(REPOSITORY, files, config={"model_type": "qwen3"}, downloads=41_000, likes=120)
    for name, downloads in (("Qwen3-8B-4bit", 68_000), ("Qwen3-14B-4bit", 23_000), ("Qwen3-0.6B-4bit", 52_000)):
        hub.add(
            f"mlx-community/{name}", files, config={"model_type": "qwen3"}, downloads=downloads, likes=downloads // 400
        )


def furnish(server: Server, browser: Browser, measurement: Mapping[str, Any]) -> None:
    """Create what the pages show: requests, a measurement, a download and a conversation."""
    server.call("POST", "/admin/api/models/load", {"model": MODEL})
    server.reply(QUESTION, max_tokens=60)
    server.reply("Write a table of the squares of 1 to 5.", max_tokens=80, temperature=0.7)
    server.call("POST", "/admin/api/measurements", measurement)
    ended = server.until("measuring", lambda value: value["active"] is None and value["last"] is not None)
    assert ended["last"]["outcome"] == "done", ended
    server.call("POST", "/admin/api/downloads", {"repository": REPOSITORY})
    server.until(
        "downloads",
        lambda value: any(download["done_bytes"] >= DOWNLOADED_BYTES // 2 for download in value["downloads"]),
    )
    converse(server, browser)


def converse(server: Server, browser: Browser) -> None:
    """Have a conversation on the chat page, as a person would."""
    with visiting(browser, server) as visit:
        page = visit.open("/admin/chat")
        page.locator("#draft").fill(QUESTION)
        page.keyboard.press("Enter")
        expect(page.locator('article[data-role="assistant"] footer dl')).to_be_visible()
        visit.check()
