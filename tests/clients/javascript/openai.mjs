// The official npm client: what it makes of each endpoint, as one JSON value. Argument: the server's address.
import OpenAI, { APIUserAbortError, BadRequestError, NotFoundError } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const address = process.argv[2];
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const Person = z.object({ first_name: z.string().max(12), age_in_years: z.number().int().min(0).max(150) });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const asked = { model: "demo-assistant", messages, temperature: 0, max_tokens: 60 };
const weather = { name: "get_weather", description: "Get the current weather for a city" };
const City = z.object({ city: z.string() });
const tools = [zodFunction({ ...weather, parameters: City })];

/** The error that a promise ends with. */
async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  throw new Error("it should have failed");
}

async function chat() {
  const whole = await client.chat.completions.create(asked);
  const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const streamed = await stream.finalContent();
  const usage = [whole.usage.total_tokens, (await stream.totalUsage()).total_tokens];
  return { text: whole.choices[0].message.content, streamed, usage };
}

async function parsed() {
  const response_format = zodResponseFormat(Person, "person");
  const answer = await client.chat.completions.parse({ ...asked, response_format });
  return answer.choices[0].message.parsed;
}

async function calls() {
  const answer = await client.chat.completions.parse({ ...asked, tools, tool_choice: "required" });
  const [call] = answer.choices[0].message.tool_calls;
  const stream = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
  const [streamed] = (await stream.finalMessage()).tool_calls;
  return { call: [call.function.name, call.function.parsed_arguments], streamed: streamed.function.parsed_arguments };
}

/** Asks, runs what is called, sends the result back, all by the client itself. */
async function ran() {
  const seen = [];
  const tool = {
    type: "function",
    function: {
      ...weather,
      parameters: z.toJSONSchema(City),
      parse: JSON.parse,
      function: ({ city }) => {
        seen.push(city);
        return "rain, 4 degrees";
      },
    },
  };
  return { text: await client.chat.completions.runTools({ ...asked, tools: [tool] }).finalContent(), seen };
}

async function responses() {
  const { messages: input, max_tokens: max_output_tokens, ...rest } = asked;
  const body = { ...rest, input, max_output_tokens };
  const whole = await client.responses.create(body);
  const parsed = await client.responses.parse({ ...body, text: { format: zodTextFormat(Person, "person") } });
  const stream = client.responses.stream(body);
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  const streamed = (await stream.finalResponse()).output_text;
  return { text: whole.output_text, streamed, parsed: parsed.output_parsed, kinds: [...new Set(kinds)] };
}

async function embeddings() {
  const { data } = await client.embeddings.create({ model: "demo-assistant", input: ["one", "two"], dimensions: 8 });
  return data.map(({ embedding }) => Math.round(100 * Math.hypot(...embedding)) / 100);
}

async function models() {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  return ids.includes("demo-assistant");
}

async function errors() {
  const missing = await failure(client.chat.completions.create({ ...asked, model: "nothing" }));
  const wrong = await failure(client.chat.completions.create({ ...asked, temperature: 9 }));
  const controller = new AbortController();
  const stream = await client.chat.completions.create({ ...asked, stream: true }, { signal: controller.signal });
  for await (const _ of stream) controller.abort();
  const gone = await failure(client.chat.completions.create(asked, { signal: controller.signal }));
  return {
    missing: [missing instanceof NotFoundError, missing.code],
    wrong: [wrong instanceof BadRequestError, wrong.param],
    gone: gone instanceof APIUserAbortError,
  };
}

const results = {};
for (const part of [chat, parsed, calls, ran, responses, embeddings, models, errors]) results[part.name] = await part();
console.log(JSON.stringify(results));
