// A reply's markdown as nodes: code under its language with a button that copies it, tables that scroll.

import { colour } from "./chat_code.js";
import { copy, t } from "./core.js";
import { blocks } from "./markdown.js";

const MAX_CHARACTERS = 100_000;

// Temml, once a reply has a formula: it writes MathML, which browsers draw themselves.
let library = null;
const MOST_EMS = 40; // of a length that a formula asks for
function load() {
  const script = Object.assign(document.createElement("script"), { src: new URL("./vendor/temml.js", import.meta.url) });
  document.head.append(script);
  return new Promise((done) => (script.onload = done));
}

function typeset(node) {
  if (!window.temml) return (library ??= load()).then(() => typeset(node));
  const box = make("span", node.className);
  const isDisplay = node.classList.contains("display");
  try {
    window.temml.render(node.textContent, box, { displayMode: isDisplay, throwOnError: true, maxSize: [MOST_EMS, MOST_EMS] });
  } catch {
    return; // it stays as it is written
  }
  node.replaceWith(box);
}

// The text as nodes; null where it is too long to be worth it.
export function markdown(text) {
  if (text.length > MAX_CHARACTERS) return null;
  const nodes = document.createDocumentFragment();
  nodes.append(...blocks(text, codeBlock));
  nodes.querySelectorAll("table").forEach((table) => {
    const scroll = make("div", "scroll");
    table.replaceWith(scroll);
    scroll.append(table);
  });
  nodes.querySelectorAll("code.formula").forEach(typeset);
  return nodes;
}

// Code under its language and a button that copies it.
export function codeBlock(text, language = "") {
  const button = make("button", "quiet plain", t("chat.copy"));
  button.type = "button";
  button.addEventListener("click", () => copy(text.replace(/\n$/, "")));
  const head = make("div", "code-head");
  head.append(make("span", "", language), button);
  const pre = make("pre");
  pre.tabIndex = 0;
  const code = make("code", "", text);
  pre.append(code);
  colour(code, language);
  const block = make("div", "code-block");
  block.append(head, pre);
  return block;
}

export function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}
