"""Messages for the tests of repairs, and the names of the templates that these tests use."""

from typing import Any

from tests.text.dialogues import user

Message = dict[str, Any]

QWEN35 = "Qwen3.5-4B"
MISTRAL = "Mistral-Small-3.2-24B-Instruct-2506"
NEMO = "mistralai-Mistral-Nemo-Instruct-2407"
MINISTRAL = "mistralai-Ministral-3-14B-Reasoning-2512"
LLAMA = "meta-llama-Llama-3.3-70B-Instruct"
HARMONY = "openai-gpt-oss-120b"
GEMMA2 = "google-gemma-2-2b-it"
GEMMA3 = "tokenizer gemma3"
MINIMAX = "MiniMax-M2"
R1 = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
PARIS = '{"city": "Paris"}'


def system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def called(*calls: tuple[str | None, Any], **more: Any) -> Message:
    """Return an assistant message with calls, each given by its id and arguments; None leaves the field out."""
    listed = []
    for identifier, arguments in calls:
        function = {"name": "weather"} | ({} if arguments is None else {"arguments": arguments})
        listed.append({"type": "function", "function": function} | ({} if identifier is None else {"id": identifier}))
    return {"role": "assistant", "content": None, "tool_calls": listed, **more}


def result(text: str, identifier: str | None = None) -> Message:
    return {"role": "tool", "content": text} | ({} if identifier is None else {"tool_call_id": identifier})


def once(identifier: str | None = "abcdefgh1", arguments: Any = PARIS, **more: Any) -> list[Message]:
    return [user("Weather?"), called((identifier, arguments), **more), result("sunny", identifier)]


def in_order(text: str, *parts: str) -> bool:
    """Return whether the text contains all parts, each after the previous one."""
    place = 0
    for part in parts:
        start = text.find(part, place)
        if start < 0:
            return False
        place = start + len(part)
    return True
