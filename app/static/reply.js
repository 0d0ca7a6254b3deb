// One message, one streamed reply: what the draft guessed right is marked, the figures follow.

import { byId, make, number, percent, show, t } from "./page.js";

const MAX_TOKENS = 400;

let running = null; // {controller, model, isWriting}, while a reply is on its way

// The models that can answer; keeps the one that was picked.
export function offerModels(models) {
  const names = models.filter((model) => model.kind === "main" && !model.problem).map((model) => model.id);
  const picker = byId("model");
  const picked = picker.value;
  show(picker, names, () => names.map((name) => new Option(name, name)));
  if (names.includes(picked)) picker.value = picked;
  byId("ask").hidden = !names.length;
  byId("none").hidden = names.length > 0;
  byId("output").hidden = byId("legend").hidden = !names.length;
}

// How far the load is that the reply waits for.
export function showLoading(loading) {
  const progress = running && !running.isWriting && loading[running.model];
  if (progress) say(t("reply.loading", { model: running.model, percent: percent(progress.fraction) }));
}

export function listenToPrompt() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.controller.abort();
    else ask();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) byId("ask").requestSubmit();
  });
}

async function ask() {
  running = { controller: new AbortController(), model: byId("model").value, isWriting: false };
  setBusy(true);
  say(t("reply.waiting"));
  try {
    const response = await post(running);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of chunks(response)) take(chunk);
  } catch (error) {
    const wasStopped = running.controller.signal.aborted;
    if (!running.isWriting) byId("output").replaceChildren();
    byId("output").append(note(wasStopped ? t("reply.stopped") : t("reply.broken", { message: error.message }), wasStopped));
  } finally {
    running = null;
    setBusy(false);
  }
}

function post({ controller, model }) {
  const body = {
    model,
    messages: [{ role: "user", content: byId("prompt").value }],
    stream: true,
    temperature: 0,
    max_tokens: MAX_TOKENS,
    speculation: { method: byId("drafts").checked ? "auto" : "off" },
  };
  const headers = { "Content-Type": "application/json" };
  return fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: controller.signal });
}

async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function take(chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices[0];
  if (choice?.delta.content) {
    if (!running.isWriting) byId("output").replaceChildren();
    running.isWriting = true;
    write(choice.delta.content, choice.accepted_spans ?? []);
  }
  if (chunk.timings) showFigures(chunk.timings, chunk.speculation);
}

// Spans count characters (code points), not UTF-16 units.
function write(text, spans) {
  const output = byId("output");
  const characters = Array.from(text);
  const wasAtEnd = output.scrollTop + output.clientHeight > output.scrollHeight - 24;
  let at = 0;
  for (const [start, end] of spans) {
    put(output, "SPAN", characters.slice(at, start));
    put(output, "MARK", characters.slice(start, end));
    at = end;
  }
  put(output, "SPAN", characters.slice(at));
  if (wasAtEnd) output.scrollTop = output.scrollHeight;
}

function put(output, kind, characters) {
  if (!characters.length) return;
  const last = output.lastChild;
  if (last?.nodeName === kind) last.firstChild.appendData(characters.join(""));
  else output.append(make(kind, "", characters.join("")));
}

function showFigures(timings, speculation) {
  const drafted = speculation.drafted;
  const figure = (value, name, title = "") => {
    const node = make("div", "", make("dt", "", name), make("dd", "", value));
    node.title = title;
    return node;
  };
  const counts = drafted ? t("figure.counts", { accepted: number(speculation.accepted), drafted: number(drafted) }) : "";
  byId("figures").replaceChildren(
    figure(number(timings.predicted_per_second, 1), t("figure.speed")),
    figure(drafted ? percent(speculation.accepted / drafted) : t("disk.unknown"), t("figure.acceptance"), counts),
    figure(number(speculation.tokens_per_cycle, 2), t("figure.cycle")),
    figure(number(timings.predicted_n), t("figure.tokens")),
  );
  byId("figures").hidden = false;
  const why = speculation.method === "off" ? t("figure.off") : t("figure.partly");
  const reason = speculation.reason ? [make("br"), `${why} ${speculation.reason}`] : [];
  byId("reason").replaceChildren(`${t("figure.method")} `, make("code", "", speculation.method), ...reason);
  byId("reason").hidden = false;
}

const note = (words, isSoft) => make("p", isSoft ? "soft" : "problem", words);

function say(words) {
  byId("output").replaceChildren(note(words, true));
}

function setBusy(isBusy) {
  byId("output").setAttribute("aria-busy", String(isBusy));
  byId("send").textContent = isBusy ? t("reply.stop") : t("reply.send");
  byId("send").classList.toggle("primary", !isBusy);
  if (isBusy) for (const id of ["figures", "reason"]) byId(id).hidden = true;
}
