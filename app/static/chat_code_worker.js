// Takes code apart by the grammar of its language. As a worker, so that a grammar that is slow over a hostile text can
// be ended.

import library from "./vendor/highlight.js";

// Pieces [text, kind] of a tree; a piece of a piece is of the innermost kind.
const piecesOf = ({ children, scope = "" }) =>
  children.flatMap((child) => (typeof child === "string" ? [[child, scope.split(".")[0]]] : piecesOf(child)));

onmessage = ({ data: { text, language } }) => postMessage(piecesOf(library.highlight(text, { language })._emitter.rootNode));
