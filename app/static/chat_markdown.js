// Renders a reply's markdown as nodes: code blocks have their language and a copy button, and tables scroll.

import { colour } from "./chat_code.js";
import { copy, t } from "./core.js";
import { blocks } from "./markdown.js";

const MAX_CHARACTERS = 100_000;

// Temml, loaded with the first formula; it writes MathML, which browsers render natively.
let library = null;
const MOST_EMS = 40; // maximum of any length in a formula
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
    return; // the formula stays as its source
  }
  node.replaceWith(box);
}

// Returns the text as nodes; null if it is too long to render.
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

// Returns a code block with its language and a copy button.
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
