"""Times that models stay in memory as requests ask for them; a new worker keeps them."""

import httpx2 as httpx

from tests.serving.conftest import Server


def seconds_left(server: Server, model: str) -> float | None:
    """Return the seconds that a model still stays in memory, as the server reports; None if it is not ready there."""
    models = httpx.get(f"{server.url}/api/status", timeout=60).json()["models"]
    return next((entry["seconds_left"] for entry in models if entry["id"] == model and entry["state"] == "ready"), None)


def load(server: Server, model: str, **asked: object) -> None:
    answer = httpx.post(f"{server.url}/api/load", json={"model": model, **asked}, timeout=60)
    assert answer.status_code == 200, answer.text


def complete(server: Server, model: str, keep_alive: object = None) -> None:
    body = {"model": model, "prompt": "x", "max_tokens": 8, "temperature": 0, "keep_alive": keep_alive}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def test_a_limit_of_a_request_survives_the_worker(server: Server) -> None:
    load(server, "attention", ttl=500)
    assert 400 < (seconds_left(server, "attention") or 0) <= 500
    worker = server.worker
    worker.kill()
    worker.wait(60)
    server.wait_ready()
    complete(server, "attention")
    assert 400 < (seconds_left(server, "attention") or 0) <= 500


def test_the_last_request_decides(server: Server) -> None:
    body = {"model": "attention", "prompt": "x", "max_tokens": 1000, "stream": True, "keep_alive": 0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        assert next(answer.iter_lines())
        complete(server, "attention", "10m")
    complete(server, "hybrid", 0)
    while seconds_left(server, "hybrid") is not None:
        pass  # it is unloaded at the next check of idle models
    assert 500 < (seconds_left(server, "attention") or 0) <= 600
