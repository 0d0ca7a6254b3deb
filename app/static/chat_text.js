// The text of a reply: who wrote which piece of it, and which parts it has (thoughts, calls of tools, the answer).

// Spans count characters (code points), not UTF-16 units.
const slice = (characters, start, end) => characters.slice(start, end).join("");

// A reply while it grows: pieces {text, method}; the method is empty for what the model wrote without a drafter.
export class Reply {
  constructor({ content = "", spans = [], reasoning = "" } = {}) {
    this.pieces = [];
    this.content = "";
    this.reasoning = reasoning;
    const characters = Array.from(content);
    let at = 0;
    for (const [start, end, method] of spans) {
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

  // Places in the whole content, with their methods: what the store keeps.
  get spans() {
    const found = [];
    let at = 0;
    for (const { text, method } of this.pieces) {
      const end = at + Array.from(text).length;
      if (method) found.push([at, end, method]);
      at = end;
    }
    return found;
  }

  get methods() {
    return [...new Set(this.pieces.map((piece) => piece.method))].filter(Boolean);
  }

  // What the model should see of its own reply in the next turn: no thoughts.
  get answer() {
    const parts = partsOf(this.content).filter((part) => part.kind !== "thought");
    return parts.map((part) => this.content.slice(part.outerStart, part.outerEnd)).join("").trim();
  }
}

const THOUGHT = { kind: "thought", open: "<think>", close: "</think>" };
const TOOL = { kind: "tool", open: "<tool_call>", close: "</tool_call>" };

// The parts of a text, in UTF-16 units: {kind, start, end, isOpen}. The tags belong to no part's inside.
export function partsOf(text) {
  const parts = [];
  const add = (kind, start, end, outerStart = start, outerEnd = end, isOpen = false) => {
    if (kind !== "text" || text.slice(start, end).trim()) parts.push({ kind, start, end, outerStart, outerEnd, isOpen });
  };
  let at = thoughtOf(text, add);
  for (;;) {
    const open = text.indexOf(TOOL.open, at);
    if (open < 0) break;
    add("text", at, open);
    const start = open + TOOL.open.length;
    const close = text.indexOf(TOOL.close, start);
    at = close < 0 ? text.length : close + TOOL.close.length;
    add("tool", start, close < 0 ? text.length : close, open, at, close < 0);
  }
  add("text", at, text.length);
  return parts;
}

// Thoughts come first; some templates open them in the prompt, so that only their end is in the text.
function thoughtOf(text, add) {
  const lead = text.length - text.trimStart().length;
  const isMarked = text.startsWith(THOUGHT.open, lead);
  const close = text.indexOf(THOUGHT.close);
  if (!isMarked && close < 0) return 0;
  const start = isMarked ? lead + THOUGHT.open.length : 0;
  const end = close < 0 ? text.length : close + THOUGHT.close.length;
  add("thought", start, close < 0 ? end : close, 0, end, close < 0);
  return end;
}
