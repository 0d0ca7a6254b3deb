// Asking and answering: sends, streams, stops, edits, asks again, and keeps every message in the store.

import { api, copy, number, percent, seconds, t } from "./core.js";
import { byId, optionsOf, requestOf } from "./chat_options.js";
import { Painter, paint } from "./chat_paint.js";
import { stream } from "./chat_stream.js";
import { Reply } from "./chat_text.js";
import { methodWords } from "./model_words.js";

const TITLE_CHARACTERS = 60;
const MAX_LAST_CHARACTERS = 20_000; // browsers finish calls of 64 KiB after the page is gone
const runs = new Map(); // by the key of its message: {controller, painter, reply, began}
const replies = new Map(); // by the key of a message: its text with who wrote what
let keys = 0;

export function makeMessage(values) {
  const key = (keys += 1);
  const { content = "", spans = [], reasoning = "", id = 0, role, figures = null } = values;
  replies.set(key, new Reply({ content, spans: spans ?? [], reasoning }));
  const status = figures?.stopped ? "stopped" : "done";
  return { key, id, role, figures, status, problem: "", isEditing: false, edited: "", version: 0 };
}

const replyOf = (message) => replies.get(message.key);
const partOf = (record, names) => Object.fromEntries(names.map((name) => [name, record[name]]));
const KEPT_TIMINGS = ["first_token_ms", "predicted_n", "predicted_per_second"];
const KEPT_SPECULATION = ["method", "reason", "drafted", "accepted", "tokens_per_cycle"];

const stored = (message) => {
  const { content, spans, reasoning } = replyOf(message);
  return { role: message.role, content, reasoning, spans, figures: message.figures };
};
const isWorthKeeping = (message) => {
  const { content, reasoning } = replyOf(message);
  return message.status !== "writing" && Boolean(content || reasoning);
};

export const thread = {
  authorOf: (message) => (message.role === "user" ? t("chat.you") : t("chat.model")),
  isWriting: (message) => message.status === "writing",
  get isBusy() {
    return this.current.messages.some((message) => message.status === "writing");
  },
  get isUnanswered() {
    return !this.isBusy && this.current.messages.at(-1)?.role === "user";
  },
  get usedMethods() {
    const names = this.current.messages.flatMap((message) => (message.version, replyOf(message).methods));
    return [...new Set(names)].map((name) => ({ name, words: methodWords(name) }));
  },

  show(node, message, view) {
    void message.version;
    const run = runs.get(message.key);
    if (run) run.painter.attach(node);
    else if (message.role === "user") node.textContent = replyOf(message).content;
    else paint(node, replyOf(message), view === "tokens");
  },

  // What is sent while the page still opens goes out when it knows its models and its conversation.
  async send() {
    await this.opening;
    const text = this.draft.toWellFormed().trim();
    if (!text || this.isBusy || !this.model) return;
    this.draft = "";
    await this.say(this.current, text);
  },
  async say(conversation, text) {
    conversation.messages.push(makeMessage({ role: "user", content: text }));
    if (!conversation.title) conversation.title = Array.from(text.split("\n")[0]).slice(0, TITLE_CHARACTERS).join("");
    this.save(conversation);
    await this.answer(conversation);
  },

  // Streams a reply to the last message of the user.
  async answer(conversation) {
    const history = conversation.messages.map((message) => ({
      role: message.role,
      content: message.role === "user" ? replyOf(message).content : replyOf(message).answer,
    }));
    conversation.messages.push({ ...makeMessage({ role: "assistant" }), status: "writing" });
    const message = conversation.messages.at(-1);
    const run = { controller: new AbortController(), painter: new Painter(replyOf(message)), reply: replyOf(message), began: performance.now() };
    runs.set(message.key, run);
    this.follow(true);
    await this.receive(message, run, requestOf(this.model, optionsOf(this.form), history));
    runs.delete(message.key);
    message.version += 1;
    this.announcement = message.problem || t("chat.finished");
    this.follow();
    await this.save(conversation);
  },
  async receive(message, run, body) {
    try {
      for await (const chunk of stream(body, run.controller.signal)) this.take(message, run, chunk);
      message.status = "done";
    } catch (error) {
      const wasStopped = error.name === "AbortError";
      message.status = wasStopped ? "stopped" : "failed";
      message.problem = wasStopped ? "" : error.message;
    }
    if (message.status !== "done") message.figures = { ...message.figures, stopped: true };
  },
  take(message, run, chunk) {
    const choice = chunk.choices[0];
    const { content = "", reasoning_content: reasoning = "", tool_calls: calls = [] } = choice?.delta ?? {};
    if ((content || reasoning) && !message.figures) {
      message.figures = { timings: { first_token_ms: performance.now() - run.began } };
    }
    run.reply.write(content ?? "", choice?.accepted_spans, choice?.method);
    run.reply.reasoning += reasoning ?? "";
    for (const call of calls ?? []) run.reply.write(`<tool_call>\n${JSON.stringify(call.function, null, 2)}\n</tool_call>`);
    if (chunk.timings) {
      const timings = partOf(chunk.timings, KEPT_TIMINGS);
      const speculation = partOf(chunk.speculation, KEPT_SPECULATION);
      message.figures = { timings, speculation, seed: chunk.seed, finish: choice?.finish_reason };
    }
    this.repaint(message, run);
  },
  // At most once a frame, however fast the tokens come.
  repaint(message, run) {
    if (run.isPlanned) return;
    run.isPlanned = true;
    requestAnimationFrame(() => {
      run.isPlanned = false;
      if (!runs.has(message.key)) return;
      run.painter.update();
      if (this.methodsSeen !== run.reply.methods.length) {
        this.methodsSeen = run.reply.methods.length;
        message.version += 1;
      }
      this.follow();
    });
  },

  stop(conversation) {
    for (const message of conversation.messages) runs.get(message.key)?.controller.abort();
  },
  // For a page that goes away.
  keepUnfinished(conversation) {
    const written = conversation.messages.filter((message) => message.status === "writing");
    for (const message of written) {
      Object.assign(message, { status: "stopped", figures: { ...message.figures, stopped: true } });
    }
    if (written.length) this.keep(conversation).catch(() => null);
  },
  // Asks for a reply once more; what came after its question is dropped.
  async again(message) {
    if (this.isBusy) return;
    const { messages } = this.current;
    const at = message ? messages.findIndex((each) => each.key === message.key) : messages.length;
    messages.splice(messages[at]?.role === "user" ? at + 1 : at);
    await this.answer(this.current);
  },
  edit(message) {
    Object.assign(message, { isEditing: true, edited: replyOf(message).content });
    this.$nextTick(() => byId(`edit-${message.key}`).focus());
  },
  async resend(message) {
    const text = message.edited.toWellFormed().trim();
    if (!text || this.isBusy) return;
    const at = this.current.messages.findIndex((each) => each.key === message.key);
    this.current.messages.splice(at);
    await this.say(this.current, text);
  },
  endEdit(message) {
    message.isEditing = false;
  },
  copyText: (message) => copy(replyOf(message).answer || replyOf(message).content),

  // Keeps what is not kept yet, in the place of everything behind what is. One call after the other.
  save(conversation) {
    const work = () => this.attempt(() => this.keep(conversation));
    conversation.saved = (conversation.saved ?? Promise.resolve()).then(work);
    return conversation.saved;
  },
  async keep(conversation) {
    if (conversation.isDeleted) return;
    if (!conversation.id) {
      const body = { title: conversation.title, model: this.model, options: optionsOf(this.form) };
      conversation.id = (await api("POST", "/admin/api/conversations", body)).id;
      if (conversation.key === this.current.key) this.remember();
    }
    const kept = conversation.messages.filter((message) => message.id || isWorthKeeping(message));
    const first = kept.findIndex((message) => !message.id);
    const fresh = first < 0 ? [] : kept.slice(first);
    const after = (first < 0 ? kept.at(-1) : kept[first - 1])?.id ?? 0;
    const body = { after, messages: fresh.map(stored) };
    const keepalive = JSON.stringify(body).length < MAX_LAST_CHARACTERS;
    const { messages } = await api("PUT", `${this.path(conversation)}/messages`, body, { keepalive });
    messages.forEach(({ id }, index) => (fresh[index].id = id));
    await this.readList();
  },

  figuresOf(message) {
    const { timings, speculation } = message.figures ?? {};
    const figures = [];
    const add = (value, words, title = "") => figures.push({ value, words, title });
    if (timings?.predicted_per_second) add(number(timings.predicted_per_second, 1), t("figure.speed"));
    if (speculation?.drafted) {
      const counts = { accepted: number(speculation.accepted), drafted: number(speculation.drafted) };
      add(percent(speculation.accepted / speculation.drafted), t("figure.acceptance"), t("figure.counts", counts));
      add(number(speculation.tokens_per_cycle, 2), t("figure.cycle"));
    }
    if (timings?.first_token_ms) add(seconds(timings.first_token_ms / 1000), t("chat.first_token"));
    if (timings?.predicted_n) add(number(timings.predicted_n), t("figure.tokens"));
    return figures;
  },
  methodOfReply: (message) => {
    const names = message.figures?.speculation?.method.split("+") ?? [];
    return names.map(methodWords).join(" + ");
  },
  reasonOf: (message) => {
    const { reason = "", method } = message.figures?.speculation ?? {};
    return reason && `${method === "off" ? t("figure.off") : t("figure.partly")} ${reason}`;
  },
  noteOf: (message) => {
    if (message.status === "stopped") return t("reply.stopped");
    return message.figures?.finish === "length" ? t("chat.length") : "";
  },
  get waitingWords() {
    if (this.isLoading) return t("reply.loading", { model: this.model, percent: percent(this.fraction) });
    return t("reply.waiting");
  },
  isWaiting: (message) => message.status === "writing" && !message.figures,
};
