// Messages and replies: sends, streams, stops, edits and regenerates. An edit or a regenerated reply becomes a branch.

import { api, copy, isEscape, isSigningInAgain, number, percent, seconds, t } from "./core.js";
import { byId, focusDraft, hasMouse, LAST_MODEL, optionsOf, requestOf, whenShown } from "./chat_options.js";
import { answering, WRITING_MS } from "./chat_outbox.js";
import { Painter, paint, paintMessage, paintResult } from "./chat_paint.js";
import { resume, stream } from "./chat_stream.js";
import { messageOf, readable, Reply, sizeOf, withFiles } from "./chat_text.js";
import { add, choose, lineTo, newTurnId, remove } from "./chat_tree.js";
import { liveStateOf, methodWords } from "./model_words.js";
import { reasonWords } from "./reason_words.js";
import { browser, tab } from "./storage.js";

const TITLE_CHARACTERS = 60;
const KEEP_MS = 1000; // interval between two saves of a reply that is being streamed
const GOING_MS = 500; // browsers abort a page's calls a moment before they send `pagehide`
const FIGURES_MS = 200;
const FIGURES_TRIES = 10;
const BEGUN = "paceline.chat.begun"; // by message id: request id of a reply whose end this tab has not seen
const readBegun = () => JSON.parse(tab.read(BEGUN) ?? "{}");
const noteBegun = (message, id) => tab.write(BEGUN, JSON.stringify({ ...readBegun(), [message.id]: id }));
const runs = new Map(); // by message id: {conversation, controller, painter, reply, began, model, isLoading, spent}
const replies = new Map(); // by message id: its content, a `Reply`

const PROBLEMS = {
  offline: () => t("core.offline"),
  cut: () => t("chat.cut"),
  worker_restarted: () => t("chat.worker_restarted"),
};
const problemWords = ({ code, message }) => PROBLEMS[code]?.() ?? message ?? "";

export function makeMessage({ id = newTurnId(), parent, role, figures = null, created_at = 0, ...said }) {
  replies.set(id, new Reply(said));
  const problem = figures?.problem ? problemWords(figures.problem) : "";
  const status = figures?.stopped ? "stopped" : "done";
  const createdAt = created_at || Date.now() / 1000;
  return { id, parent, role, figures, createdAt, status, problem, unsaved: "", isEditing: false, edited: "", version: 0 };
}

export const replyOf = (message) => replies.get(message.id);
const partOf = (record, names) => Object.fromEntries(names.map((name) => [name, record[name]]));
const KEPT_TIMINGS = ["first_token_ms", "predicted_n", "predicted_per_second"];
const KEPT_SPECULATION = ["method", "reason", "reason_code", "reason_values", "drafted", "accepted", "tokens_per_cycle"];
const keptFigures = ({ timings, speculation, seconds: spent }) => ({
  timings: { ...partOf(timings, KEPT_TIMINGS), ...(spent?.load && { load_ms: 1000 * spent.load }) },
  speculation: partOf(speculation, KEPT_SPECULATION),
});

// Returns a turn in the server's format; a reply that is still being streamed counts as stopped.
export function stored(message) {
  const { content, spans, reasoning, calls } = replyOf(message);
  const figures = message.status === "writing" ? { ...message.figures, stopped: true } : message.figures;
  const { id, parent, role, createdAt: created_at } = message;
  return { id, parent, role, content, reasoning, spans, calls, figures, created_at };
}
const isSaid = (message) => sizeOf(replyOf(message)) > 0 || replyOf(message).calls.length > 0;

// Returns the tool call that the next turn of `line` answers, or null: results are in the order of the reply's calls.
function callBefore(line) {
  const asking = line.findLastIndex((message) => message.role !== "tool");
  return asking < 0 ? null : (replyOf(line[asking]).wholeCalls[line.length - 1 - asking] ?? null);
}

// Returns a turn for copying and exporting: its text, and its tool calls as code blocks.
export function textOf(message) {
  const { content, calls } = replyOf(message);
  const blocks = calls.map((call) => {
    const text = `{"name": ${JSON.stringify(call.name)}, "arguments": ${call.arguments}}`;
    return `\`\`\`json\n${readable(text) ?? text}\n\`\`\``;
  });
  return [content.trim(), ...blocks].filter(Boolean).join("\n\n");
}

// Converts a line of turns to messages of the API.
const asMessages = (line) =>
  line.map((message, at) => {
    const { content, reasoning, wholeCalls } = replyOf(message);
    if (message.role === "user") return { role: "user", content };
    if (message.role === "tool") return { role: "tool", tool_call_id: callBefore(line.slice(0, at))?.id, content };
    const calls = wholeCalls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return { role: "assistant", content, reasoning_content: reasoning || null, tool_calls: calls.length ? calls : null };
  });
const readRequest = async (id) => (await api("GET", `/admin/api/requests/${id}`).catch(() => null))?.request;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export const thread = {
  authorOf: ({ role }) => ({ user: t("chat.you"), assistant: t("chat.model"), tool: t("chat.result") })[role],
  isSaid,
  isWriting: (message) => message.status === "writing",
  get isBusy() {
    return this.current.writing > 0;
  },
  answeredElsewhere: [], // ids of the messages that other tabs are answering, or were until a moment ago
  get isUnanswered() {
    const last = this.current.messages.at(-1);
    return !this.isBusy && last && last.role !== "assistant" && !this.openCall;
  },
  get isAnsweredElsewhere() {
    return this.isUnanswered && this.answeredElsewhere.includes(this.current.messages.at(-1).id);
  },
  get unansweredWords() {
    return this.isAnsweredElsewhere ? t("chat.elsewhere") : t("chat.unanswered");
  },
  // The end of a reply reaches this tab through the server, a moment after its entry is gone.
  noteOthers() {
    this.answeredElsewhere = [...new Set([...this.answeredElsewhere, ...answering()])];
    clearTimeout(this.noting);
    this.noting = setTimeout(() => (this.answeredElsewhere = answering()), WRITING_MS + KEEP_MS);
  },
  // The first tool call without a result at the end of the line on screen, or null.
  get openCall() {
    if (this.isBusy) return null;
    void this.current.messages.at(-1)?.version;
    return callBefore(this.current.messages);
  },
  get openCallWords() {
    return this.openCall ? t("chat.result_of", { name: this.openCall.name }) : "";
  },
  get usedMethods() {
    const names = this.shown.flatMap((message) => {
      void message.version;
      return replyOf(message).methods;
    });
    return [...new Set(names)].map((name) => ({ name, words: methodWords(name) }));
  },

  show(node, message, view) {
    void message.version;
    const run = runs.get(message.id);
    if (run) run.painter.attach(node);
    else if (message.role === "user") paintMessage(node, replyOf(message).content);
    else if (message.role === "tool") paintResult(node, replyOf(message).content, this.callOf(message)?.name ?? "");
    else paint(node, replyOf(message), view === "tokens");
  },

  // Sends the typed message, once the page has read its models and its conversation.
  async send() {
    await this.opening;
    const text = this.draft.toWellFormed().trim();
    if (!(text || this.files.length) || this.isBusy || !this.model) return;
    const content = withFiles(text, this.files);
    Object.assign(this, { draft: "", files: [] });
    this.keepDraft(); // clears it now, because the first turn changes `draftKey`
    await this.say(this.current, content, this.current.messages.at(-1)?.id ?? "");
  },
  // Sends the result of a tool call; the model continues after every call has one.
  async sendResult() {
    const content = this.result.toWellFormed();
    if (!this.openCall || !this.model) return;
    this.result = "";
    await this.say(this.current, content, this.current.messages.at(-1).id, "tool");
  },
  async say(conversation, content, parent, role = "user") {
    if (!conversation.title) {
      const { text, files } = messageOf(content);
      const title = Array.from((text || files[0].name).split("\n")[0]).slice(0, TITLE_CHARACTERS).join("");
      Object.assign(conversation, { title, model: this.model, options: optionsOf(this.form) });
    }
    const message = makeMessage({ role, content, parent });
    add(conversation, message);
    this.hideEarlier(conversation);
    this.remember();
    this.keepAndSend(conversation, message);
    if (callBefore(lineTo(conversation, message.id)) === null) await this.answer(conversation, message.id);
    else this.toResult();
  },
  callOf(message) {
    const { messages } = this.current;
    return callBefore(messages.slice(0, messages.indexOf(message)));
  },
  // Focuses the field for the tool result that a reply waits for, unless the user is typing elsewhere.
  toResult() {
    whenShown(() => {
      this.follow();
      const isFree = [document.body, byId("draft")].includes(document.activeElement) && !this.draft;
      if (this.openCall && isFree && hasMouse()) byId("result").focus();
    });
  },

  // Streams a reply to a user's message or to tool results.
  async answer(conversation, parent) {
    const history = lineTo(conversation, parent).filter((message) => message.role !== "assistant" || isSaid(message));
    add(conversation, { ...makeMessage({ role: "assistant", parent }), status: "writing" });
    const [model, form, controller] = [this.model, { ...this.form }, new AbortController()];
    browser.write(LAST_MODEL, model);
    const chunks = async function* () {
      yield* stream(requestOf(model, form, asMessages(history)), controller.signal);
    };
    await this.write(conversation, conversation.turns.at(-1), controller, chunks());
  },
  isBegun: (message) => message.status === "stopped" && Boolean(readBegun()[message.id]),
  // Resumes a reply that an earlier page began: the server keeps writing for a while and replays it from the start.
  async goOn(conversation, message) {
    const controller = new AbortController();
    const chunks = resume(readBegun()[message.id], controller.signal);
    noteBegun(message);
    const first = await chunks.next().catch(() => null);
    if (!first?.value) return;
    replies.set(message.id, new Reply());
    Object.assign(message, { status: "writing", figures: null, problem: "", version: message.version + 1 });
    const whole = async function* () {
      yield first.value;
      yield* chunks;
    };
    await this.write(conversation, message, controller, whole());
  },
  async write(conversation, message, controller, chunks) {
    const now = performance.now();
    const reply = replyOf(message);
    const isLoading = this.stateName !== "loaded";
    const run = { conversation, controller, painter: new Painter(reply), reply, began: now, keptAt: now, model: this.model, isLoading };
    runs.set(message.id, run);
    conversation.writing += 1;
    this.follow(true);
    await this.receive(message, run, chunks);
    conversation.writing -= 1;
    runs.delete(message.id);
    if (message.figures?.problem?.code !== "cut") noteBegun(message);
    // Nothing was written, and the page leaves: the error depends on how much of the refusal the browser still read.
    if (isSigningInAgain() && !run.id) return remove(conversation, message.id);
    message.version += 1;
    this.announce({ done: t("chat.finished"), stopped: t("reply.stopped") }[message.status] ?? message.problem);
    this.toResult();
    this.keep(conversation, message);
    const { load } = (await run.spent) ?? {};
    if (load && message.status === "done") message.figures.timings.load_ms = 1000 * load; // first: the server never changes a complete turn
    await this.keepAndSend(conversation, message);
    if (message.status !== "done" && run.id) await this.readFigures(conversation, message, run.id);
  },
  async receive(message, run, chunks) {
    try {
      for await (const chunk of chunks) this.take(message, run, chunk);
      message.status = "done";
    } catch (error) {
      const wasStopped = error.name === "AbortError";
      if (error.code === "offline") await pause(GOING_MS);
      message.status = wasStopped ? "stopped" : "failed";
      message.figures = { ...message.figures, stopped: true };
      if (wasStopped) return;
      const cut = (text, length) => String(text ?? "").slice(0, length).toWellFormed();
      message.figures.problem = { code: cut(error.code, 100), message: cut(error.message, 4000) };
      message.problem = problemWords(error);
    }
  },
  // Fetches the figures of a reply that broke off, because its stream ended without them.
  async readFigures(conversation, message, id) {
    for (let tries = 0; tries < FIGURES_TRIES; tries += 1) {
      const request = await readRequest(id);
      if (!request) return;
      message.figures = { ...message.figures, ...keptFigures(request.figures) };
      this.keep(conversation, message);
      if (request.phase === "done") break;
      await pause(FIGURES_MS);
    }
    await this.keepAndSend(conversation, message);
  },
  take(message, run, chunk) {
    const choice = chunk.choices[0];
    if (!run.id) noteBegun(message, (run.id = chunk.id));
    const { content = "", reasoning_content: reasoning = "", tool_calls: calls = [] } = choice?.delta ?? {};
    if ((content || reasoning || calls?.length) && !message.figures) {
      message.figures = { timings: { first_token_ms: performance.now() - run.began } };
      if (run.isLoading && run.id) run.spent = readRequest(run.id).then((request) => request?.figures.seconds);
    }
    run.reply.write(content ?? "", choice?.accepted_spans, choice?.method);
    run.reply.reasoning += reasoning ?? "";
    for (const call of calls ?? []) run.reply.call(call);
    if (chunk.timings) {
      message.figures = { ...keptFigures(chunk), seed: chunk.seed, finish: choice?.finish_reason };
    }
    if (performance.now() - run.keptAt > KEEP_MS) {
      run.keptAt = performance.now();
      this.keep(run.conversation, message);
    }
    this.repaint(message, run);
  },
  // Redraws at most once a frame, however fast the tokens arrive.
  repaint(message, run) {
    if (run.isPlanned) return;
    run.isPlanned = true;
    requestAnimationFrame(() => {
      run.isPlanned = false;
      if (!runs.has(message.id)) return;
      run.painter.update();
      if (this.methodsSeen !== run.reply.methods.length) {
        this.methodsSeen = run.reply.methods.length;
        message.version += 1;
      }
      this.follow();
    });
  },

  stop(conversation) {
    for (const run of conversation.turns.map((message) => runs.get(message.id)).filter(Boolean)) {
      run.controller.abort();
      if (run.id) api("POST", `/admin/api/requests/${run.id}/cancel`).catch(() => null); // else it would continue for a while
    }
  },
  // Saves partial replies before the page is closed. Those without a chunk are left out: the user can ask again.
  keepUnfinished(conversation) {
    for (const message of conversation.turns.filter((turn) => runs.get(turn.id)?.id)) {
      Object.assign(message, { status: "stopped", figures: { ...message.figures, stopped: true } });
      this.keepAndSend(conversation, message);
    }
  },
  // Generates a reply: a sibling of an earlier one, or the first for a message that has none.
  async again(message = this.current.messages.at(-1)) {
    if (this.isBusy) return;
    focusDraft(); // the pressed button goes
    await this.answer(this.current, message.role === "assistant" ? message.parent : message.id);
  },
  edit(message) {
    Object.assign(message, { isEditing: true, edited: messageOf(replyOf(message).content).text });
    whenShown(() => byId(`edit-${message.id}`)?.focus());
  },
  async resend(message) {
    const text = message.edited.toWellFormed().trim();
    const content = withFiles(text, messageOf(replyOf(message).content).files);
    if (!content || this.isBusy) return;
    message.isEditing = false;
    focusDraft();
    await this.say(this.current, content, message.parent, message.role);
  },
  endEdit(message) {
    message.isEditing = false;
    whenShown(() => byId(`change-${message.id}`)?.focus());
  },
  typeEdit(message, event) {
    if (!isEscape(event)) return;
    event.preventDefault(); // else it would also stop a reply
    this.endEdit(message);
  },

  // The versions of a turn; an empty reply counts only while it is on screen or being streamed.
  versionsOf(message) {
    const versions = this.current.followers.get(message.parent) ?? [];
    return versions.filter((turn) => turn.id === message.id || turn.status === "writing" || isSaid(turn));
  },
  hasVersions(message) {
    return this.versionsOf(message).length > 1;
  },
  versionWords(message) {
    const versions = this.versionsOf(message);
    return t("chat.version", { at: number(versions.findIndex((turn) => turn.id === message.id) + 1), count: number(versions.length) });
  },
  // Names the version that has later turns, if this one has none.
  laterWords(message) {
    const { followers } = this.current;
    const at = followers.has(message.id) ? -1 : this.versionsOf(message).findIndex((turn) => followers.has(turn.id));
    return at < 0 ? "" : t("chat.later", { at: number(at + 1) });
  },
  isFirstVersion(message) {
    return this.versionsOf(message)[0]?.id === message.id;
  },
  isLastVersion(message) {
    return this.versionsOf(message).at(-1)?.id === message.id;
  },
  // Screen readers stay silent about a text that is the same as before.
  announce(words) {
    this.announcement = "";
    whenShown(() => (this.announcement = words));
  },
  // Shows the previous or next version; the focus stays on the pressed button while that is enabled.
  turnTo(message, step) {
    const versions = this.versionsOf(message);
    const next = versions[versions.findIndex((turn) => turn.id === message.id) + step];
    if (!next) return;
    choose(this.current, next.id);
    this.announce(this.versionWords(next));
    this.$nextTick(() => {
      const sides = step < 0 ? ["before", "after"] : ["after", "before"];
      const buttons = sides.map((side) => byId(`${side}-${next.id}`)); // null if an empty reply was the only other version
      (buttons.find((button) => button?.disabled === false) ?? byId("draft")).focus();
    });
  },
  copyText: (message) => copy(textOf(message)),

  figuresOf(message) {
    const { timings, speculation } = message.figures ?? {};
    const figures = [];
    const show = (value, words, title = "", tone = "") => figures.push({ value, words, title, tone });
    if (timings?.predicted_per_second) show(number(timings.predicted_per_second, 1), t("figure.speed"));
    if (speculation?.drafted) {
      const counts = { accepted: number(speculation.accepted), drafted: number(speculation.drafted) };
      show(percent(speculation.accepted / speculation.drafted), t("figure.acceptance"), t("figure.counts", counts));
    }
    if (speculation?.method) show(methodWords(speculation.method), "", t("figure.method"));
    const { first_token_ms: first, load_ms: load = 0 } = timings ?? {};
    if (load) show(seconds(load / 1000), t("chat.load"), "", "more");
    if (first) show(seconds(Math.max(0, first - load) / 1000), t("chat.first_token"), "", "more");
    if (speculation?.drafted) show(number(speculation.tokens_per_cycle, 2), t("figure.step"), "", "extra");
    if (timings?.predicted_n) show(number(timings.predicted_n), t("figure.tokens"), "", "most");
    return figures;
  },
  reasonOf: (message) => {
    const speculation = message.figures?.speculation ?? {};
    const reason = reasonWords(speculation);
    if (speculation.reason_code?.startsWith("missing_")) return reason;
    return reason && `${speculation.method === "off" ? t("figure.off") : t("figure.partly")} ${reason}`;
  },
  noteOf: (message) => {
    if (message.status === "stopped" && !message.problem) return t("reply.stopped");
    return message.figures?.finish === "length" ? t("chat.length") : "";
  },
  // How far the model of a reply is loaded; null if that is no reason to wait.
  loadedShare(message) {
    const model = runs.get(message.id)?.model;
    const now = this.state && model && liveStateOf(this.state, model);
    return now?.state === "loading" ? now.fraction : null;
  },
  waitingWords(message) {
    const share = this.loadedShare(message);
    if (share === null) return t("reply.waiting");
    return t("reply.loading", { model: runs.get(message.id).model, percent: percent(share) });
  },
  isWaiting: (message) => message.status === "writing" && !message.figures,
};
