// Markdown within a paragraph: emphasis, code, links, and line breaks, which are intended in a chat. Emphasis depends
// on the spaces around its marks, not on punctuation, so that it also works in languages written without spaces.
// Parsing time is linear in the length of the text, for any text.

const PIECES =
  /(\\[([]|\$\$?)|\\([!-/:-@[-`{-~])|(`+)|(!?\[)|<(https?:\/\/[^\s<>]+)>|(\bhttps?:\/\/[\w.:@[\]-]+(?:[/?#][^\s<>\u3000-\u303f\uff00-\uffef\u2018-\u201d]*)?)|(\*+|_+|~~)|(\\\n|(?<! ) *\n)|&(amp|lt|gt|quot|nbsp|#39);/g;
const TARGET = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0", "#39": "'" };
const PUNCTUATION = /(?<![.,:;!?'"*_~])[.,:;!?'"*_~]+$/;
const MAX_OPEN = 40;
const MAX_TARGET = 2000;
// Closing marks by opening mark of a formula. A single dollar is money unless it touches both ends of a short formula.
const CLOSERS = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };
const DOLLARS = /\$(?!\s)([^$\n]{0,200}[^\s$\\])\$(?!\d)/y;
const WORD = /[\p{L}\p{N}_]/u;

export function make(tag, children = []) {
  const node = document.createElement(tag);
  for (const child of children) node.append(child); // a single call accepts only about 100,000 arguments
  return node;
}

function link(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return children;
  }
  if (!/^https?:$/.test(url.protocol)) return children;
  return [Object.assign(make("a", children), { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href })];
}

// Returns a formula as source text; chat_markdown.js renders it.
export const formula = (text, isDisplay) => Object.assign(make("code", [text]), { className: isDisplay ? "formula display" : "formula" });

// Returns the nodes of a text. `inLink` prevents links within links.
export function inline(text, inLink = false) {
  const pieces = new RegExp(PIECES);
  const ends = endsOf(text);
  const line = new Line();
  let at = 0;
  for (let piece = pieces.exec(text); piece; piece = pieces.exec(text)) {
    line.text(text.slice(at, piece.index));
    at = pieces.lastIndex = take(line, text, piece, ends, inLink);
  }
  line.text(text.slice(at));
  return line.end();
}

// Returns the closing position of each opening bracket, the start of the last backtick run of each length, and the
// position of the last closing mark of each kind of formula.
function endsOf(text) {
  const brackets = new Map();
  const open = [];
  for (const { 0: sign, index } of text.matchAll(/\\[^]|[[\]]/g)) {
    if (sign === "[") open.push(index);
    else if (sign === "]" && open.length) brackets.set(open.pop(), index);
  }
  const ticks = new Map(Array.from(text.matchAll(/`+/g), ({ 0: run, index }) => [run.length, index]));
  const formulas = Object.fromEntries(Object.values(CLOSERS).map((closer) => [closer, text.lastIndexOf(closer)]));
  return { brackets, ticks, formulas };
}

// Adds a piece to the line; returns the position to continue from.
function take(line, text, piece, ends, inLink) {
  const [whole, opener, escaped, ticks, bracket, angled, bare, marks, , entity] = piece;
  const next = piece.index + whole.length;
  if (opener) return takeFormula(line, text, opener, next, ends.formulas);
  if (escaped) line.text(escaped);
  else if (entity) line.text(ENTITIES[entity]);
  else if (ticks) return takeCode(line, text, ticks, next, ends.ticks);
  else if (bracket) return takeLink(line, text, bracket, next, inLink ? -1 : ends.brackets.get(next - 1));
  else if (angled) line.add(...link(angled, [angled]));
  else if (bare) return takeAddress(line, bare, piece.index, inLink);
  else if (marks) line.mark(marks, text[piece.index - 1] ?? " ", text[next] ?? " ");
  else line.add(make("br"));
  return next;
}

function takeFormula(line, text, opener, from, ends) {
  const closer = CLOSERS[opener];
  let content = "";
  let end = from;
  if (closer && ends[closer] >= from) {
    const at = text.indexOf(closer, from);
    [content, end] = [text.slice(from, at).trim(), at + closer.length];
  } else if (opener === "$") {
    DOLLARS.lastIndex = from - 1;
    content = DOLLARS.exec(text)?.[1] ?? "";
    end = DOLLARS.lastIndex;
  }
  if (!content) return line.text(opener.at(-1) === "$" ? opener : opener[1]), from;
  line.add(formula(content, opener === "\\[" || opener === "$$"));
  return end;
}

function takeCode(line, text, ticks, from, lastRuns) {
  if (!(lastRuns.get(ticks.length) >= from)) return line.text(ticks), from;
  const closing = new RegExp(`(?<!\`)${ticks}(?!\`)`, "g");
  closing.lastIndex = from;
  const code = text.slice(from, closing.exec(text).index).replace(/\n/g, " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
  line.add(make("code", [isPadded ? code.slice(1, -1) : code]));
  return closing.lastIndex;
}

function takeLink(line, text, bracket, from, end = -1) {
  const [whole, address] = (end > 0 && end - from < MAX_TARGET && TARGET.exec(text.slice(end + 1, end + MAX_TARGET))) || [];
  if (!whole) return line.text(bracket), from;
  const words = text.slice(from, end) || address;
  line.add(...link(address, inline(words, true)));
  return end + 1 + whole.length;
}

// An address in running text ends before the punctuation that ends the sentence.
function takeAddress(line, bare, from, inLink) {
  let address = bare.replace(PUNCTUATION, "");
  if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
  line.add(...(inLink ? [address] : link(address, [address])));
  return from + address.length;
}

// The pieces of a line, and the opening marks among them that are not closed yet.
class Line {
  pieces = [];
  open = [];

  text(text) {
    if (text) this.pieces.push(text);
  }

  add(...nodes) {
    this.pieces.push(...nodes);
  }

  mark(marks, before, after) {
    const [sign] = marks;
    const isInside = sign === "_" && WORD.test(before) && WORD.test(after);
    const canClose = !/\s/.test(before) && !isInside && (sign !== "_" || !WORD.test(after));
    const canOpen = !/\s/.test(after) && !isInside && (sign !== "_" || !WORD.test(before));
    let left = canClose ? this.close(sign, marks.length) : marks.length;
    if (!left) return;
    this.pieces.push(sign.repeat(left));
    const waiting = this.open.reduce((sum, mark) => sum + mark.left, left);
    if (canOpen && waiting <= MAX_OPEN) this.open.push({ sign, left, at: this.pieces.length - 1 });
  }

  // Wraps the pieces since the nearest open mark of this sign, until either side is used up; returns the unused count.
  close(sign, count) {
    while (count) {
      const index = this.open.findLastIndex((mark) => mark.sign === sign);
      if (index < 0) return count;
      const opener = this.open[index];
      const used = sign === "~" ? 2 : Math.min(2, count, opener.left);
      const inner = this.pieces.splice(opener.at + 1);
      if (!inner.length) return count;
      const tag = sign === "~" ? "del" : used === 2 ? "strong" : "em";
      this.open.length = index;
      opener.left -= used;
      count -= used;
      if (opener.left) {
        this.pieces[opener.at] = sign.repeat(opener.left);
        this.open.push(opener);
      } else this.pieces.length = opener.at;
      this.pieces.push(make(tag, inner));
    }
    return 0;
  }

  end() {
    return this.pieces;
  }
}
