// Draws a turn as markdown, or as raw text in which each drafting method's pieces have its colour.

import { t } from "./core.js";
import { codeBlock, make, markdown } from "./chat_markdown.js";
import { messageOf, readable, readableAnswer } from "./chat_text.js";
import { methodWords } from "./model_words.js";

// Draws the whole reply again.
export function paint(node, reply, isRaw) {
  const wasOpen = node.querySelector("details")?.open ?? false;
  const nodes = [];
  if (reply.reasoning) nodes.push(folded("thought", t("chat.thought"), make("div", "raw", reply.reasoning)));
  if (reply.content.trim()) nodes.push(isRaw ? rawBox(reply.pieces) : readBox(reply.content));
  nodes.push(...reply.calls.map(callBox));
  node.replaceChildren(...nodes);
  const details = node.querySelector("details");
  if (details) details.open = wasOpen;
}

// Draws a user's message with its files folded.
export function paintMessage(node, content) {
  const { text, files } = messageOf(content);
  const folds = files.map((file) => {
    const words = `${file.name} · ${t.n("chat.characters", file.text.length)}`;
    const box = make("pre", "", file.text);
    box.tabIndex = 0;
    return folded("file", words, box);
  });
  node.replaceChildren(...(text || !files.length ? [document.createTextNode(text)] : []), ...folds);
}
export const paintResult = (node, content, name) =>
  node.replaceChildren(codeBlock(readable(content) ?? content, t("chat.result_of", { name })));

function readBox(content) {
  const json = readableAnswer(content);
  if (json) return codeBlock(json, "JSON");
  const box = make("div", "prose");
  box.append(markdown(content) ?? make("div", "raw", content));
  return box;
}

function rawBox(pieces) {
  const box = make("div", "raw");
  put(box, pieces, 0, Infinity);
  return box;
}

const callBox = (call) => codeBlock(readable(call.arguments) ?? call.arguments, t("chat.call", { name: call.name }));

function folded(kind, words, box) {
  const details = make("details", kind);
  details.append(make("summary", "", words), box);
  return details;
}

// Appends the text between two offsets of the joined pieces to the box.
function put(box, pieces, from, to) {
  let at = 0;
  for (const { text, method } of pieces) {
    const part = text.slice(Math.max(0, from - at), Math.max(0, to - at));
    at += text.length;
    if (part) append(box, part, method);
    if (at >= to) return;
  }
}

function append(box, text, method) {
  const last = box.lastChild;
  if (last && last.dataset.method === method) return last.firstChild.appendData(text);
  const node = make(method ? "mark" : "span", "", text);
  node.dataset.method = method;
  if (method) node.title = methodWords(method);
  box.append(node);
}

// Draws a reply while it is being streamed: appends only new text.
export class Painter {
  constructor(reply) {
    this.reply = reply;
    this.node = null;
  }

  attach(node) {
    Object.assign(this, { node, thought: null, text: null, calls: [], thoughtTo: 0, textTo: 0 });
    node.replaceChildren();
    this.update();
  }

  update() {
    if (!this.node) return;
    const { content, reasoning, pieces, calls } = this.reply;
    if (reasoning) this.think(reasoning, !content && !calls.length);
    if (content) {
      this.text ??= this.add(make("div", "raw"));
      put(this.text, pieces, this.textTo, content.length);
      this.textTo = content.length;
    }
    calls.forEach((call, at) => {
      this.calls[at] ??= this.add(callBox(call));
      this.calls[at].querySelector("code").textContent = call.arguments;
    });
  }

  think(reasoning, isThinking) {
    this.thought ??= this.add(folded("thought", "", make("div", "raw", "")));
    const [summary, box] = this.thought.children;
    summary.textContent = isThinking ? t("chat.thinking") : t("chat.thought");
    box.append(reasoning.slice(this.thoughtTo));
    this.thoughtTo = reasoning.length;
  }

  add(node) {
    this.node.append(node);
    return node;
  }
}
