"""Measures the server's time for each page with 1,000 requests in its history: `python bench/first_paint.py`.

Starts a server of its own with the embedded demo model loaded; times are from request to last byte, on loopback.
"""

import statistics
import time
from pathlib import Path

import httpx2

from app.core.request import FinishedRequest
from app.store.rows import RequestHistory
from app.store.store import FILE_NAME, Store
from bench.live_feed import KEY, MODEL, server

REQUESTS = 1_000
ROUNDS = 30
PAGES = ("/admin/", "/admin/models", "/admin/requests", "/admin/settings", "/admin/chat", "/admin/connect")
FIGURES = {
    "usage": {"prompt_tokens": 812, "completion_tokens": 200},
    "timings": {"predicted_per_second": 93.4},
    "speculation": {"method": "dflash", "drafted": 300, "accepted": 210, "reason": ""},
    "seconds": {"total": 3.2},
}


def remember(home: Path) -> None:
    """Put the requests into the history."""
    store = Store(home / FILE_NAME)
    now = time.time()
    past = [
        FinishedRequest(
            id=f"chatcmpl-{number:06}",
            endpoint="chat",
            model_id=MODEL,
            key_name="",
            created_at=now - number,
            outcome="stop",
            figures=FIGURES,
        )
        for number in range(REQUESTS)
    ]
    RequestHistory(store).save(past, limit=10 * REQUESTS)
    store.close()


def main() -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with server(remember) as (address, _), httpx2.Client(base_url=address, headers=headers, timeout=120) as client:
        client.post("/api/load", json={"model": MODEL})
        for page in PAGES:
            seconds = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                response = client.get(page)
                seconds.append(time.perf_counter() - began)
            times = {"first": seconds[0], "median": statistics.median(seconds), "worst": max(seconds)}
            timings = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in times.items())
            print(f"{page}: {response.status_code}, {timings}, {len(response.content) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
