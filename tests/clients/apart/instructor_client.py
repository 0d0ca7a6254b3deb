"""instructor in three modes that ask a server for structured output; prints what it parsed."""

import json
import sys

import instructor
import openai
import pydantic


class Person(pydantic.BaseModel, extra="forbid"):
    """A person."""

    first_name: str = pydantic.Field(max_length=12)
    age_in_years: int = pydantic.Field(ge=0, le=150)


url, model = sys.argv[1:]
answers = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Describe a person."}]
    asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 100, "max_retries": 0}
    answers[mode.value] = client.chat.completions.create(response_model=Person, **asked).model_dump()
print(json.dumps(answers))
