// Markdown to nodes. marked never passes on HTML that is in the text, and what it made goes through DOMPurify last:
// a short list of elements, links to http(s) only, no image, no style, no attribute that anything could act on.

import { copy, t } from "./core.js";
import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const MAX_CHARACTERS = 100_000;
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "data-language", "href", "start"],
  ALLOWED_URI_REGEXP: /^https?:/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ADD_URI_SAFE_ATTR: ["align", "data-language", "start"],
  RETURN_DOM_FRAGMENT: true,
};

const escape = (text) => String(text).replace(/[&<>"'`]/g, (each) => `&#${each.charCodeAt(0)};`);

const parser = new Marked({
  gfm: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escape(text)}</p>` : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => `<pre data-language="${escape((lang ?? "").split(/\s/)[0])}"><code>${escape(text)}</code></pre>`,
  },
});

// The text as nodes; null where it is too long or too twisted to be worth it.
export function markdown(text) {
  if (text.length > MAX_CHARACTERS) return null;
  let html;
  try {
    html = parser.parse(text);
  } catch {
    return null;
  }
  const nodes = globalThis.DOMPurify.sanitize(html, ALLOWED);
  nodes.querySelectorAll("a").forEach(finishLink);
  nodes.querySelectorAll("pre").forEach((pre) => pre.replaceWith(codeBlock(pre.textContent, pre.dataset.language)));
  nodes.querySelectorAll("table").forEach((table) => {
    const scroll = make("div", "scroll");
    table.replaceWith(scroll);
    scroll.append(table);
  });
  return nodes;
}

function finishLink(link) {
  if (!link.hasAttribute("href")) return link.replaceWith(...link.childNodes);
  Object.assign(link, { target: "_blank", rel: "noopener noreferrer", title: link.href });
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
  pre.append(make("code", "", text));
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
