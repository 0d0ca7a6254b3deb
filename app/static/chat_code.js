// Syntax colours of complete code blocks. highlight.js tokenizes one block at a time in a worker, which starts with the
// first block in a known language.

const LANGUAGES = new Set(
  ("bash c c# c++ cc console cpp cs csharp css diff go golang graphql h hpp html ini java javascript js json jsonc jsx kotlin kt " +
    "less lua make makefile markdown md mjs objc objectivec patch perl php py python r rb rs ruby rust scss sh shell sql svg " +
    "swift toml ts tsx typescript vb vbnet wasm xml yaml yml zsh").split(" "),
);
const MAX_CHARACTERS = 50_000;
const MAX_MS = 5000;
let worker = null;
let last = Promise.resolve();

// Replaces a block's text with coloured spans; if that fails or takes too long, the text stays as it is.
export function colour(node, name) {
  const language = name.toLowerCase();
  if (!LANGUAGES.has(language) || node.textContent.length > MAX_CHARACTERS) return;
  last = last.then(async () => {
    const pieces = node.isConnected && (await piecesOf(node.textContent, language));
    if (pieces) node.replaceChildren(...pieces.map(([text, kind]) => (kind ? span(text, kind) : text)));
  });
}

function piecesOf(text, language) {
  worker ??= new Worker(new URL("./chat_code_worker.js", import.meta.url), { type: "module" });
  worker.postMessage({ text, language });
  return new Promise((done) => {
    const timer = setTimeout(() => giveUp(), MAX_MS);
    const end = (pieces) => {
      clearTimeout(timer);
      done(pieces);
    };
    const giveUp = () => {
      worker.terminate();
      worker = null;
      end(null);
    };
    worker.onmessage = ({ data }) => end(data);
    worker.onerror = (event) => {
      event.preventDefault();
      giveUp();
    };
  });
}

function span(text, kind) {
  const node = document.createElement("span");
  node.className = `code-${kind}`;
  node.textContent = text;
  return node;
}
