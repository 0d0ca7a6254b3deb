// A reply on the page: as markdown, or as its raw text with the pieces of each drafter in its colour.

import { t } from "./core.js";
import { codeBlock, make, markdown } from "./chat_markdown.js";
import { partsOf } from "./chat_text.js";
import { methodWords } from "./model_words.js";

// The whole reply anew.
export function paint(node, reply, isRaw) {
  const wasOpen = node.querySelector("details")?.open ?? false;
  const parts = partsOf(reply.content);
  const nodes = parts.map((part) => (isRaw ? rawPart(reply, part) : readPart(reply.content, part)));
  if (reply.reasoning) nodes.unshift(thought(rawText(reply.reasoning), !reply.content));
  node.replaceChildren(...nodes);
  const details = node.querySelector("details");
  if (details) details.open = wasOpen;
}

function readPart(content, part) {
  const text = content.slice(part.start, part.end);
  if (part.kind === "tool") return codeBlock(text.trim(), t("chat.tool"));
  const box = make("div", "prose");
  box.append(markdown(text) ?? rawText(text));
  return part.kind === "thought" ? thought(box, part.isOpen) : box;
}

function rawPart(reply, part) {
  const box = make(part.kind === "tool" ? "pre" : "div", "raw");
  put(box, reply.pieces, part.start, part.end);
  return part.kind === "thought" ? thought(box, part.isOpen) : box;
}

const rawText = (text) => make("div", "raw", text);

function thought(box, isOpen) {
  const details = make("details", "thought");
  details.append(make("summary", "", isOpen ? t("chat.thinking") : t("chat.thought")), box);
  return details;
}

// The pieces between two places, behind what the box holds already.
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

// Follows a reply while it is written: adds what is new, and begins anew only where another part began.
export class Painter {
  constructor(reply) {
    this.reply = reply;
    this.node = null;
  }

  attach(node) {
    this.node = node;
    this.shape = null;
    this.update();
  }

  update() {
    if (!this.node) return;
    const { content, reasoning, pieces } = this.reply;
    const parts = partsOf(content);
    const shape = JSON.stringify([reasoning.length, ...parts.map((part) => [part.kind, part.start, part.isOpen])]);
    const box = [...this.node.querySelectorAll(".raw")].at(-1);
    if (shape !== this.shape || !box) paint(this.node, this.reply, true);
    else put(box, pieces, this.painted, parts.at(-1).end);
    this.shape = shape;
    this.painted = parts.at(-1)?.end ?? 0;
  }
}
