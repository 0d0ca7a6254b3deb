"""The hostile strings are sixty different ones, and no JSON route of the chat changes any of them."""

import pytest

from tests.admin.hostile import HOSTILE
from tests.admin.signing import make_sign_in_site

pytestmark = pytest.mark.anyio


def test_there_are_sixty_different_ones() -> None:
    assert len(HOSTILE) == len(set(HOSTILE.values())) == 60


async def test_conversations_give_back_what_was_put_in() -> None:
    client = await make_sign_in_site().signed_in()
    for text in HOSTILE.values():
        title = text[:200]
        made = await client.post("/admin/api/conversations", json={"title": title, "options": {"system": text}})
        assert made.status_code == 201
        path = f"/admin/api/conversations/{made.json()['id']}"
        message = {"role": "assistant", "content": text, "reasoning": text, "spans": [[0, 2, text[:60]]]}
        assert (await client.put(path + "/messages", json={"after": 0, "messages": [message]})).status_code == 200
        found = (await client.get(path)).json()
        assert (found["title"], found["options"]) == (title, {"system": text})
        assert {name: found["messages"][0][name] for name in message} == message
