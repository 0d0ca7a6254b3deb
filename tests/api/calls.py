"""Worker scripts that call tools, for tests of how each API returns the calls."""

from collections.abc import AsyncIterator, Sequence

from app.core.messages import Accepted, Delta, Finished, Generate, ToolCallDelta
from tests.api.fakes import USAGE, Script


def calling(
    *calls: tuple[str, Sequence[str]], text: str = "", reason: str = "tool_calls", unfinished: int | None = None
) -> Script:
    """Return a script that writes calls, each a name and pieces of arguments; `unfinished`: index of a call cut off."""

    async def script(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        yield Accepted(id=command.id, prompt_tokens=5)
        if text:
            yield Delta(id=command.id, index=0, text=text, tokens=1)
        for index, (name, pieces) in enumerate(calls):
            begun = ToolCallDelta(index=index, id=f"call{index}", name=name)
            more = [ToolCallDelta(index=index, arguments=piece) for piece in pieces]
            for piece in (begun, *more):
                yield Delta(id=command.id, index=0, text="", tokens=1, tool_calls=(piece,))
        yield Finished(id=command.id, index=0, finish_reason=reason, usage=USAGE, unfinished_call=unfinished)

    return script
