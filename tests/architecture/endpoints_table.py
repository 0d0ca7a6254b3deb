"""Makes the tables of `docs/api.md` from the OpenAPI document: `python -m tests.architecture.endpoints_table`."""

import re
from collections.abc import Iterable
from typing import Any

from app.api.commands import GenerationBody
from app.serving.document import ALWAYS, STATUSES, document
from tests.api.fakes import make_site
from tests.architecture.source import ROOT

PAGE = ROOT / "docs" / "api.md"
PLACE = re.compile(r"(?<=## Endpoints\n\n).*?(?=## )", re.DOTALL)
DASHBOARD = ("/admin", "/static")
SHARED = [name for name in GenerationBody.model_fields if name != "model"]


def fields(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the names of a body's fields, without those that all generation requests share."""
    if "requestBody" not in operation:
        return ""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    whole = schemas[schema["$ref"].rpartition("/")[2]]
    parts = [schemas[part["$ref"].rpartition("/")[2]] for part in whole.get("anyOf", ())] or [whole]
    names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
    is_generation = names.keys() >= set(SHARED)
    return quoted(name for name in names if not (is_generation and name in SHARED))


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def endpoints_tables() -> str:
    """Return a table of endpoints with the fields that each reads, and a table of statuses with their meanings."""
    openapi = document(make_site().app)
    rows = ["| Endpoint | What it does | Fields | Other statuses |\n|---|---|---|---|\n"]
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            if path == "/" or path.startswith(DASHBOARD):
                continue
            about = operation["description"].partition("\n")[0]
            besides = [status for status in operation["responses"] if int(status) not in {200, 401, 415, *ALWAYS}]
            read = fields(operation, openapi["components"]["schemas"])
            rows.append(f"| `{method.upper()} {path}` | {about} | {read} | {', '.join(besides)} |\n")
    rows.append(f"\n`/v1/chat/completions` and `/v1/completions` also read {quoted(SHARED)}.\n")
    rows.append("\nAny request may end with 401 (where keys are required), 415 (where there is a body) and ")
    rows.append(f"{', '.join(map(str, ALWAYS))}.\n\n| Status | Meaning |\n|---|---|\n")
    rows += [f"| {status} | {meaning} |\n" for status, meaning in STATUSES.items() if status >= 400]
    return "".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: endpoints_tables(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
