"""`GET /`: a small page that says where the API is and how to call it. Nothing external, no script."""

import hashlib
import html
import json
from base64 import b64encode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.api.context import context_of

STYLE = (
    ":root{color-scheme:light dark;font:16px/1.6 system-ui,sans-serif}"
    "body{max-width:46rem;margin:3rem auto;padding:0 1rem}"
    "pre{overflow:auto;padding:1rem;border-radius:.5rem;background:color-mix(in srgb,currentColor 8%,transparent)}"
)
STYLE_HASH = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'self'; script-src 'none'; style-src 'sha256-{STYLE_HASH}'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
MAX_LISTED = 50

router = APIRouter()


@router.get("/", response_class=HTMLResponse)
def get_welcome(request: Request) -> HTMLResponse:
    """The page; with an API key set it does not tell which models are here."""
    context = context_of(request)
    names: list[str] = []
    if context.settings.api_key is None:
        names = [model.id for model in context.resolver.models() if model.kind == "main" and not model.problem]
    base = f"http://{request.headers['host']}/v1"
    page = render(base, names, has_key=context.settings.api_key is not None)
    return HTMLResponse(page, headers={"content-security-policy": POLICY, "cache-control": "no-store"})


def render(base_url: str, models: list[str], *, has_key: bool) -> str:
    """The HTML; everything that comes from outside is escaped."""
    body = {"model": models[0] if models else "MODEL", "messages": [{"role": "user", "content": "Hello"}]}
    key = " -H 'Authorization: Bearer '\"$PACELINE_API_KEY\"" if has_key else ""
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    command = f"curl {base_url}/chat/completions{key} \\\n  -H 'Content-Type: application/json' \\\n  -d '{data}'"
    items = "".join(f"<li><code>{html.escape(name)}</code></li>" for name in models[:MAX_LISTED])
    listing = f"<h2>Models</h2><ul>{items}</ul>" if items else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>Paceline</h1>"
        f"<p>OpenAI-compatible endpoint: <code>{html.escape(base_url)}</code></p>"
        f"{listing}<h2>Try it</h2><pre>{html.escape(command)}</pre></body></html>"
    )
