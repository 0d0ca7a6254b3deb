// A turn's content. Reply: text pieces with their drafting methods, reasoning, tool calls. Message: text and files.

// Spans count characters (code points), not UTF-16 units.
const slice = (characters, start, end) => characters.slice(start, end).join("");

const MAX_NAME_CHARACTERS = 200; // longest id or name of a call, because the model may write anything

// A reply while it grows: pieces {text, method}; the method is empty for text that was not drafted.
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

  // Appends the text of one step; `spans` are ranges of `text` that `method` drafted.
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

  // Adds a delta of a tool call; the first delta has its name.
  call({ index = this.calls.length, id, function: { name, arguments: more = "" } = {} }) {
    const cut = (text) => String(text ?? "").slice(0, MAX_NAME_CHARACTERS).toWellFormed();
    const call = (this.calls[index] ??= { id: cut(id), name: cut(name), arguments: "" });
    call.arguments += more;
  }

  // Drafted ranges of the whole content, with their methods, as the store keeps them.
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

  // Calls with complete arguments; only these can get a result.
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
const MAX_INDENTS = 40; // also for deeper nesting, else the spaces would grow with the square of the depth

// Indents JSON and keeps every number as it was written; null if the text is not JSON.
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

// Indents an answer that is a JSON object or array; null for any other text.
export const readableAnswer = (text) => (/^\s*[{[]/.test(text) ? readable(text) : null);

// --- files, attached as text at the end of a message ---------------------------------------------------------------

const FILE = /(?<!\n)\n*<file name="([^"\n]*)">\n([\s\S]*?)\n<\/file>(?=\s*(?:<file name="|$))/g;

export const withFiles = (text, files) =>
  [text, ...files.map((file) => `<file name="${file.name}">\n${file.text}\n</file>`)].filter(Boolean).join("\n\n");

// Splits a message into the typed text and its files {name, text}.
export function messageOf(content) {
  const files = [...content.matchAll(FILE)].map(([, name, text]) => ({ name, text }));
  return { text: files.length ? content.replace(FILE, "").trimEnd() : content, files };
}

// Reads a file as text. Throws if it is binary.
export async function readFile(file) {
  const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  if (text.includes("\0")) throw new TypeError("no text");
  return { name: file.name.replace(/["\p{Cc}<>]/gu, "_").slice(0, 200), text };
}
