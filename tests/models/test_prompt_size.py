"""A prompt is too long if it leaves no room for an answer token; a prompt to embed needs no such room."""

import pytest

from app.core.errors import InvalidRequest
from app.core.messages import Generate
from app.core.unit import LiveValues, ModelSpecification
from app.models.prompt_size import check_prompt


@pytest.mark.parametrize(("embeds", "longest"), [("", 7), ("mean", 8)])
def test_tokens_fill_the_context_up_to_what_must_follow_them(embeds: str, longest: int) -> None:
    model = ModelSpecification(id="m", path="", live=LiveValues(context_tokens=8))
    check_prompt(Generate(id="r", model=model, tokens=tuple(range(longest)), embeds=embeds))
    with pytest.raises(InvalidRequest):
        check_prompt(Generate(id="r", model=model, tokens=tuple(range(longest + 1)), embeds=embeds))
