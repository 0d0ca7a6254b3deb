// Vercel's AI SDK over its provider for compatible servers, as one JSON value. Argument: the server's address.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const address = process.argv[2];
const paceline = createOpenAICompatible({
  name: "paceline",
  baseURL: `${address}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = {
  model: paceline("demo-assistant"),
  prompt: "What is the weather in Oslo?",
  temperature: 0,
  maxOutputTokens: 60,
  maxRetries: 0,
  providerOptions: { paceline: { speculation: { method: "auto" } } },
};
const schema = z.object({ first_name: z.string().max(12), age_in_years: z.number().int().min(0).max(150) });
const weather = tool({
  description: "Get the current weather for a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain, 4 degrees in ${city}`,
});
const withTools = { ...asked, tools: { get_weather: weather }, stopWhen: isStepCount(3) };

async function chat() {
  const whole = await generateText(asked);
  const stream = streamText(asked);
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  const usage = [whole.usage.totalTokens, (await stream.usage).totalTokens];
  return { text: whole.text, streamed, usage };
}

async function object() {
  const whole = (await generateObject({ ...asked, schema })).object;
  const stream = streamObject({ ...asked, schema });
  let pieces = 0;
  for await (const _ of stream.partialObjectStream) pieces += 1;
  return { object: whole, streamed: await stream.object, grew: pieces > 1 };
}

const told = (steps) => steps.flatMap((step) => step.toolResults.map(({ input, output }) => [input.city, output]));

async function tools() {
  const whole = await generateText(withTools);
  const stream = streamText(withTools);
  const kinds = [];
  for await (const part of stream.fullStream) kinds.push(part.type);
  return {
    text: whole.text,
    results: told(whole.steps),
    streamed: await stream.text,
    streamedResults: told(await stream.steps),
    kinds: [...new Set(kinds)],
  };
}

async function embedding() {
  const model = paceline.embeddingModel("demo-assistant");
  return Math.round(100 * Math.hypot(...(await embed({ model, value: "one", maxRetries: 0 })).embedding)) / 100;
}

async function errors() {
  try {
    await generateText({ ...asked, model: paceline("nothing") });
  } catch (error) {
    return [APICallError.isInstance(error), error.statusCode, error.isRetryable];
  }
  throw new Error("it should have failed");
}

globalThis.AI_SDK_LOG_WARNINGS = false; // generateObject is deprecated, and what most programs call
const results = {};
for (const part of [chat, object, tools, embedding, errors]) results[part.name] = await part();
console.log(JSON.stringify(results));
