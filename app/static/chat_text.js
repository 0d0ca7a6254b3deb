// What a turn says: a reply with who wrote which piece of it, what it thinks and calls; a message with its files.

// Spans count characters (code points), not UTF-16 units.
const slice = (characters, start, end) => characters.slice(start, end).join("");

const MAX_NAME_CHARACTERS = 200; // what is kept of a name that the model made up

// A reply while it grows: pieces {text, method}; the method is empty for what the model wrote without a drafter.
export class Reply {
  constructor({ content = "", spans, reasoning, calls } = {}) {
    this.pieces = [];
    this.content = "";
    this.reasoning = reasoning ?? "";
    this.calls = (calls ?? []).map((call) => ({ ...call }));
    const characters = Array.from(content);
    let at = 0;
    for (const [start, end, method] of spans ?? []) {
      this.put(slice(characters, at, start), "");
      this.put(slice(characters, start, end), method);
      at = end;
    }
    this.put(slice(characters, at), "");
  }

  // What one step brought; `spans` are places in `text`.
  write(text, spans = [], method = "") {
    const characters = Array.from(text);
    let at = 0;
    for (const [start, end] of spans) {
      this.put(slice(characters, at, start), "");
      this.put(slice(characters, start, end), method);
      at = end;
    }
    this.put(slice(characters, at), "");
  }

  put(text, method) {
    if (!text) return;
    const last = this.pieces.at(-1);
    if (last?.method === method) last.text += text;
    else this.pieces.push({ text, method });
    this.content += text;
  }

  // More of a call; its first piece names it.
  call({ index = this.calls.length, id, function: { name, arguments: more = "" } = {} }) {
    const cut = (text) => String(text ?? "").slice(0, MAX_NAME_CHARACTERS).toWellFormed();
    const call = (this.calls[index] ??= { id: cut(id), name: cut(name), arguments: "" });
    call.arguments += more;
  }

  // Places in the whole content, with their methods: what the store keeps.
  get spans() {
    const spans = [];
    let at = 0;
    for (const { text, method } of this.pieces) {
      const end = at + Array.from(text).length;
      if (method) spans.push([at, end, method]);
      at = end;
    }
    return spans;
  }

  get methods() {
    return [...new Set(this.pieces.map((piece) => piece.method))].filter(Boolean);
  }

  // Calls that were written to their end: a result can be given to them.
  get wholeCalls() {
    return this.calls.filter((call) => isJson(call.arguments));
  }
}

export const sizeOf = ({ content, reasoning, calls = [] }) =>
  calls.reduce((sum, call) => sum + call.arguments.length, content.length + reasoning.length);

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

const TOKENS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s"{}[\],:]+/g;
const INDENT = "  ";
const MAX_INDENTS = 40; // of what is nested deeper, too: spaces would grow with the square of the depth

// JSON on lines of its own, with every number as it was written; null where the text is none.
export function readable(text) {
  if (!isJson(text)) return null;
  let [line, depth, before] = ["", 0, ""];
  const newLine = () => `\n${INDENT.repeat(Math.min(depth, MAX_INDENTS))}`;
  for (const [token] of text.matchAll(TOKENS)) {
    const isEnd = token === "}" || token === "]";
    const wasStart = before === "{" || before === "[";
    if (isEnd) depth -= 1;
    if (isEnd ? !wasStart : wasStart || before === ",") line += newLine();
    line += token === ":" ? ": " : token;
    if (token === "{" || token === "[") depth += 1;
    before = token;
  }
  return line;
}

// A whole answer of JSON, on lines of its own; null for any other text.
export const readableAnswer = (text) => (/^\s*[{[]/.test(text) ? readable(text) : null);

// --- files, which go along as text at the end of a message ---------------------------------------------------------

const FILE = /(?<!\n)\n*<file name="([^"\n]*)">\n([\s\S]*?)\n<\/file>(?=\s*(?:<file name="|$))/g;

export const withFiles = (text, files) =>
  [text, ...files.map((file) => `<file name="${file.name}">\n${file.text}\n</file>`)].filter(Boolean).join("\n\n");

// A message taken apart: what was typed, and its files {name, text}.
export function messageOf(content) {
  const files = [...content.matchAll(FILE)].map(([, name, text]) => ({ name, text }));
  return { text: files.length ? content.replace(FILE, "").trimEnd() : content, files };
}

// A file as text. Throws where it is none.
export async function readFile(file) {
  const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  if (text.includes("\0")) throw new TypeError("no text");
  return { name: file.name.replace(/["\p{Cc}<>]/gu, "_").slice(0, 200), text };
}
