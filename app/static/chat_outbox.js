// Turns that the server has not acknowledged yet, in the browser's storage: one entry for each turn, so that tabs do
// not overwrite each other. An entry is {number, version, begin, turn, until}; any tab may send it, more than once.

import { browser } from "./storage.js";

const PREFIX = "paceline.chat.unsaved.";
export const WRITING_MS = 3000; // a tab that streams a reply renews its entry each second; meanwhile no tab sends it

const nameOf = (number, id) => `${PREFIX}${number}.${id}`;

export function put(entry, isWriting = false) {
  const name = nameOf(entry.number, entry.turn.id);
  browser.write(name, JSON.stringify({ ...entry, until: isWriting ? Date.now() + WRITING_MS : 0 }));
}

// Removes an entry, unless it has changed since it was read.
export function drop(entry) {
  const name = nameOf(entry.number, entry.turn.id);
  if (browser.read(name) === entry.text) browser.remove(name);
}

const names = () => browser.names().filter((name) => name.startsWith(PREFIX));

// Returns the entries of one conversation, or of all, without replies that a tab is still streaming.
export function entries(number = "") {
  const wanted = names().filter((name) => !number || name.startsWith(nameOf(number, "")));
  const unsaved = wanted.map((name) => ({ ...JSON.parse(browser.read(name)), text: browser.read(name) }));
  return unsaved.filter((entry) => entry.until < Date.now());
}

// Returns the ids of the messages that a tab is answering now.
export const answering = () =>
  names().map((name) => JSON.parse(browser.read(name))).filter((entry) => entry?.until > Date.now()).map(({ turn }) => turn.parent);

export const isLeftToOthers = () => names().length > entries().length;

// Removes the entries of a deleted conversation, or all, so that no tab sends them any more.
export function discard(number = "") {
  for (const name of names()) if (!number || name.startsWith(nameOf(number, ""))) browser.remove(name);
}
