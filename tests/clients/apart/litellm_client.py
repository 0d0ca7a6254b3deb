"""litellm as a library: chat, stream, tools, text completion, embeddings, Anthropic's API, a refused request."""

import json
import sys

import litellm

url, model = sys.argv[1:]
asked = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60, "num_retries": 0}
count = [{"role": "user", "content": "Count from 1 to 5."}]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "get_weather", "description": "Get the current weather for a city", "parameters": parameters}
tools = [{"type": "function", "function": function}]
weather = [{"role": "user", "content": "What is the weather in Oslo?"}]

whole = litellm.completion(f"openai/{model}", messages=count, **asked).choices[0].message.content
pieces = litellm.completion(f"openai/{model}", messages=count, stream=True, **asked)
streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
[call] = litellm.completion(f"openai/{model}", messages=weather, tools=tools, **asked).choices[0].message.tool_calls
text = litellm.text_completion("one two", f"text-completion-openai/{model}", **asked).choices[0].text
numbers = litellm.embedding(f"openai/{model}", input=["one"], api_base=f"{url}/v1", api_key="none").data[0]["embedding"]
anthropic = litellm.completion(
    f"anthropic/{model}", messages=count, api_base=url, api_key="none", max_tokens=60, temperature=0, num_retries=0
)
try:
    litellm.completion("openai/nothing", messages=count, **asked)
    refused = ""
except litellm.NotFoundError as error:
    refused = type(error).__name__
assert whole == streamed == anthropic.choices[0].message.content
print(json.dumps([whole, call.function.name, call.function.arguments, text, f"{numbers[0]:.4f}", refused]))
