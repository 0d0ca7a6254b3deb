"""There are sixty different hostile strings, and the routes for conversations return each of them unchanged."""

import pytest

from tests.admin.hostile import HOSTILE
from tests.admin.signing import make_sign_in_site

pytestmark = pytest.mark.anyio


def test_there_are_sixty_different_ones() -> None:
    assert len(HOSTILE) == len(set(HOSTILE.values())) == 60


async def test_conversations_give_back_what_was_put_in() -> None:
    client = await make_sign_in_site().signed_in()
    for number, text in enumerate(HOSTILE.values(), start=1):
        path = f"/admin/api/conversations/{number}"
        title = text[:200]
        turn = {"id": "a1", "parent": "", "role": "assistant", "content": text, "reasoning": text}
        turn |= {"spans": [[0, 2, text[:60]]], "figures": {"problem": {"message": text[:4000]}}}
        begin = {"title": title, "options": {"system": text}}
        assert (
            await client.post(path + "/turns", json={"version": 0, "turns": [turn], "begin": begin})
        ).status_code == 200
        conversation = (await client.get(path)).json()
        assert (conversation["title"], conversation["options"]) == (title, {"system": text})
        assert {name: conversation["turns"][0][name] for name in turn} == turn
