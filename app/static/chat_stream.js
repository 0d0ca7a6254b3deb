// Streamed completions, chunk by chunk. Throws ApiError for a refusal, an error frame or a cut connection.

import { ApiError, signInAgain, t } from "./core.js";

const ADDRESS = "/admin/api/v1/chat/completions";
const DATA = "data: ";
const DONE = "[DONE]";

export const stream = (body, signal) =>
  chunks(ADDRESS, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
// Replays the stream of a request that an earlier page made, from its beginning.
export const resume = (id, signal) => chunks(`/admin/api/replies/${id}`, { signal });

async function* chunks(address, options) {
  const response = await ask(address, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) throw new ApiError(t("chat.cut"), "cut", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith(DATA)) continue;
      if (line === DATA + DONE) return;
      const chunk = JSON.parse(line.slice(DATA.length));
      if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code, response.status);
      yield chunk;
    }
  }
}

async function ask(address, options) {
  let response;
  try {
    response = await fetch(address, { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(t("core.offline"), "offline", 0);
  }
  if (response.status === 401) signInAgain();
  if (response.ok) return response;
  const problem = (await response.json().catch(() => null))?.error;
  throw new ApiError(problem?.message ?? t("core.failed", { status: response.status }), problem?.code, response.status);
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(t("chat.cut"), "cut", 0);
  }
}
