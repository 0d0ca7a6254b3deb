"""Clients that fill shared storage with thousands of responses and conversations: others lose nothing of theirs."""

import asyncio
import time

import httpx2

from campaign.attack import Arena
from campaign.chats import MODEL

RESPONSES, CLIENTS = 100, 4
VALUES, CHARACTERS, TAKEN_CHARACTERS = 16, 60_000, 512
"""Metadata of a response: number of values, characters per value to try, and characters per value that OpenAI takes."""
CONVERSATIONS = 200
FULL = 400
"""Status of the answer to a conversation beyond the limit."""
KEPT = "/v1/responses"


async def hoard_responses(arena: Arena) -> None:
    """Store as many responses as one key may; an earlier response of another key must still be there."""
    async with arena.client() as client, arena.server.client(await arena.server.new_key()) as other:
        kept = await ask(arena, other, "mine", 1)
        shares = [RESPONSES // CLIENTS] * CLIENTS
        await asyncio.gather(*(hoard(arena, client, share) for share in shares))
        answer = await other.get(f"{KEPT}/{kept}")
        arena.findings.answered(answer.status_code, answer.headers, answer.content, "a kept response")
        arena.findings.expect(answer.is_success, f"the response of another key is gone: {answer.status_code}")


async def hoard(arena: Arena, client: httpx2.AsyncClient, count: int) -> None:
    """Store `count` responses with metadata as large as is accepted."""
    for _ in range(count):
        if not await ask(arena, client, "x" * CHARACTERS, VALUES):
            await ask(arena, client, "x" * TAKEN_CHARACTERS, VALUES)


async def ask(arena: Arena, client: httpx2.AsyncClient, value: str, values: int) -> str:
    """Store a response with such metadata and return its id; empty if it is refused."""
    metadata = {f"k{number}": value for number in range(values)}
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 1, "store": True, "metadata": metadata}
    answer = await client.post(KEPT, json=body)
    arena.findings.answered(answer.status_code, answer.headers, answer.content, "POST /v1/responses")
    return str(answer.json()["id"]) if answer.is_success else ""


async def hoard_conversations(arena: Arena) -> None:
    """Add hundreds of conversations each turn, until the store is full; time the list of all of them."""
    async with arena.server.client(arena.server.admin_key) as admin:
        for number in range(CONVERSATIONS):
            turns = [{"id": "q1", "parent": "", "role": "user", "content": "words " * 200}]
            body = {"version": 0, "turns": turns, "begin": {"title": f"Conversation {number}"}}
            address = f"/admin/api/conversations/{arena.chance.getrandbits(52)}/turns"
            answer = await admin.post(address, json=body)
            arena.findings.answered(answer.status_code, answer.headers, answer.content, "a new conversation")
            if answer.status_code == FULL:
                await arena.server.call("DELETE", "/admin/api/conversations")
        began = time.monotonic()
        answer = await admin.get("/admin/api/conversations", params={"search": "words"})
        arena.findings.took("list of conversations", time.monotonic() - began)
        arena.findings.answered(answer.status_code, answer.headers, answer.content, "the list of conversations")
