"""Code to copy: a first request, for the shell and for Python. Names of models are quoted, whatever is in them."""

import json
import shlex

PROMPT = "Count from 1 to 20."
MESSAGE = {"role": "user", "content": PROMPT}


def curl_example(base_url: str, model: str, *, has_key: bool) -> str:
    """A command for a POSIX shell; the key comes from the environment."""
    body = f'{{"model": {json.dumps(model, ensure_ascii=False)},\n       "messages": [{json.dumps(MESSAGE)}]}}'
    lines = [f"curl {shlex.quote(base_url + '/chat/completions')}"]
    if has_key:
        lines.append('-H "Authorization: Bearer $PACELINE_API_KEY"')
    lines += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(body)}"]
    return " \\\n  ".join(lines)


def python_example(base_url: str, model: str, *, has_key: bool) -> str:
    """A program for OpenAI's client; JSON strings are Python strings."""
    key = 'os.environ["PACELINE_API_KEY"]' if has_key else '"none"'
    lines = ["import os", ""] if has_key else []
    lines += [
        "from openai import OpenAI",
        "",
        "client = OpenAI(",
        f"    base_url={json.dumps(base_url)},",
        f"    api_key={key},",
        ")",
        f"message = {json.dumps(MESSAGE)}",
        "reply = client.chat.completions.create(",
        f"    model={json.dumps(model, ensure_ascii=False)},",
        "    messages=[message],",
        ")",
        "print(reply.choices[0].message.content)",
    ]
    return "\n".join(lines)
