// Tokenizes code by the grammar of its language. It is a worker, so that the page can terminate a grammar that is slow
// on a hostile text.

import library from "./vendor/highlight.js";

// Flattens a tree into pieces [text, kind]; nested text gets the innermost kind.
const piecesOf = ({ children, scope = "" }) =>
  children.flatMap((child) => (typeof child === "string" ? [[child, scope.split(".")[0]]] : piecesOf(child)));

onmessage = ({ data: { text, language } }) => postMessage(piecesOf(library.highlight(text, { language })._emitter.rootNode));
