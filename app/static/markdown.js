// Markdown to nodes, block by block. Text from outside only ever becomes text: no markup is parsed or made, HTML in it
// is shown as it is, and links lead only to http(s). A document may be incomplete: replies arrive piece by piece.

import { formula, inline, make } from "./markdown_inline.js";

// No pattern has adjacent repeats of the same characters: a line that does not match would take quadratic time.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/s;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const COLUMN = /^:?-+:?$/;
const TASK = /^\[([ xX])\]\s/;
const MAX_DEPTH = 16;
const FORMULA = /^ {0,3}(\\\[|\$\$)/;
const MAX_FORMULA_LINES = 200;

const isBlank = (line) => !line.trim();
const afterBlanks = (lines, at) => {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
};
const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

// Returns the nodes of a text; `code(text, language)` makes the node of a code block.
export function blocks(text, code) {
  return parse(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), code, 0).nodes;
}

// Each reader parses one kind of block at line `at`. It returns [node, next line], or null for other kinds.
const READERS = [readFence, readFormula, readHeading, readRule, readQuote, readList, readTable, readParagraph];

function parse(lines, code, depth) {
  const nodes = [];
  let isLoose = false;
  const end = lines.findLastIndex((line) => !isBlank(line)) + 1;
  for (let at = 0; at < end; ) {
    if (isBlank(lines[at])) {
      isLoose ||= nodes.length > 0;
      at += 1;
      continue;
    }
    const readers = depth < MAX_DEPTH ? READERS : [readParagraph];
    for (const read of readers) {
      const block = read(lines, at, code, depth);
      if (!block) continue;
      nodes.push(block[0]);
      at = block[1];
      break;
    }
  }
  return { nodes, isLoose };
}

function readFence(lines, at, code) {
  const [, fence, words] = FENCE.exec(lines[at]) ?? [];
  if (!fence) return null;
  const closes = (line) => line.trim().startsWith(fence) && line.trim() === fence[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const indent = lines[at].search(/\S/);
  const content = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, Math.max(0, line.search(/\S/)))));
  return [code(content.join("\n"), words.trim().split(/\s/, 1)[0]), end + 1];
}

// Reads a display formula, inside which markdown is not parsed.
function readFormula(lines, at) {
  const [begin, opener] = FORMULA.exec(lines[at]) ?? [];
  if (!opener) return null;
  const closer = opener === "$$" ? "$$" : "\\]";
  const content = [lines[at].slice(begin.length), ...lines.slice(at + 1, at + MAX_FORMULA_LINES)];
  const last = content.findIndex((line) => line.trimEnd().endsWith(closer));
  if (last < 0) return null;
  const text = content.slice(0, last + 1).join("\n").trimEnd().slice(0, -closer.length).trim();
  return text ? [formula(text, true), at + last + 1] : null;
}

function readHeading(lines, at) {
  const [, marks, text = ""] = HEADING.exec(lines[at]) ?? [];
  return marks ? [make(`h${marks.length}`, inline(text.replace(/(?:^|\s)#+\s*$/, "").trim())), at + 1] : null;
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? [make("hr"), at + 1] : null;
}

function readQuote(lines, at, code, depth) {
  if (!QUOTE.test(lines[at])) return null;
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && (QUOTE.test(lines[end]) || !startsBlock(lines[end]))) end += 1;
  const content = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [make("blockquote", parse(content, code, depth + 1).nodes), end];
}

// --- lists -------------------------------------------------------------------------------------------------------

const kindOf = (mark) => (/\d/.test(mark) ? mark.at(-1) : mark);

function readList(lines, at, code, depth) {
  const [, , mark] = ITEM.exec(lines[at]) ?? [];
  if (!mark) return null;
  const items = [];
  let isLoose = false;
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || kindOf(item[2]) !== kindOf(mark) || RULE.test(lines[next])) break;
    const end = endOfItem(lines, next, item);
    const content = parse(contentOf(lines.slice(next, end), item), code, depth + 1);
    items.push(content.nodes);
    next = afterBlanks(lines, end);
    isLoose ||= content.isLoose || (next > end && next < lines.length && kindOf(ITEM.exec(lines[next])?.[2] ?? "") === kindOf(mark));
  }
  const list = make(/\d/.test(mark) ? "ol" : "ul", items.map((nodes) => make("li", isLoose ? nodes : tight(nodes))));
  if (/\d/.test(mark) && parseInt(mark, 10) !== 1) list.start = parseInt(mark, 10);
  return [list, next];
}

const indentOf = ([, indent, mark, space]) => indent.length + mark.length + (space.length >= 1 && space.length <= 4 ? space.length : 1);

// Returns the end of an item, which includes indented lines below it and the rest of its paragraph.
function endOfItem(lines, at, item) {
  const indent = indentOf(item);
  for (let end = at + 1; ; ) {
    const next = afterBlanks(lines, end);
    if (next === lines.length) return end;
    const goesOn = next === end && !startsBlock(lines[next]);
    if (lines[next].search(/\S/) < indent && !goesOn) return end;
    end = next + 1;
  }
}

function contentOf(lines, item) {
  const indent = indentOf(item);
  const rest = lines.slice(1).map((line) => line.slice(Math.min(indent, Math.max(0, line.search(/\S/)))));
  return [lines[0].slice(item[0].length).replace(TASK, (_, done) => (done === " " ? "☐ " : "☑ ")), ...rest];
}

const tight = (nodes) => nodes.flatMap((node) => (node.tagName === "P" ? [...node.childNodes] : [node]));

// --- tables ------------------------------------------------------------------------------------------------------

const cellsOf = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));

function readTable(lines, at) {
  if (!lines[at].includes("|")) return null;
  const names = cellsOf(lines[at]);
  const columns = cellsOf(lines[at + 1] ?? "");
  if (names.length !== columns.length || !columns.every((cell) => COLUMN.test(cell))) return null;
  const sides = columns.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  // One wide cell replaces all missing cells: short rows below many columns would make quadratically many cells.
  const row = (kind, cells) => {
    const shown = cells.slice(0, sides.length);
    const nodes = shown.map((cell, index) => Object.assign(make(kind, inline(cell)), { align: sides[index] }));
    if (shown.length < sides.length) nodes.push(Object.assign(make(kind), { colSpan: sides.length - shown.length }));
    return make("tr", nodes);
  };
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines[end])) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row("td", cellsOf(line)));
  return [make("table", [make("thead", [row("th", names)]), make("tbody", body)]), end];
}

function readParagraph(lines, at) {
  let end = at + 1;
  for (; end < lines.length && !isBlank(lines[end]); end += 1) {
    const [, mark] = UNDERLINE.exec(lines[end]) ?? [];
    const text = () => inline(lines.slice(at, end).map((line) => line.trim()).join("\n"));
    if (mark) return [make(mark[0] === "=" ? "h1" : "h2", text()), end + 1];
    if (startsBlock(lines[end]) || readTable(lines, end)) break;
  }
  return [make("p", inline(lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd())), end];
}
