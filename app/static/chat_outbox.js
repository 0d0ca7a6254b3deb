// What the server has not acknowledged yet, in the browser's own storage: one entry for each turn, so that tabs do not
// overwrite each other. An entry is {number, version, begin, turn, until}; any tab may send it, more than once.

import { browser } from "./storage.js";

const PREFIX = "paceline.chat.unsaved.";
const WRITING_MS = 3000; // a tab that writes a reply renews its entry each second: until then it is left to it

const nameOf = (number, id) => `${PREFIX}${number}.${id}`;

export function put(entry, isWriting = false) {
  const name = nameOf(entry.number, entry.turn.id);
  browser.write(name, JSON.stringify({ ...entry, until: isWriting ? Date.now() + WRITING_MS : 0 }));
}

// Takes an entry away, unless it says something else by now.
export function drop(entry) {
  const name = nameOf(entry.number, entry.turn.id);
  if (browser.read(name) === entry.text) browser.remove(name);
}

const names = () => browser.names().filter((name) => name.startsWith(PREFIX));

// The entries of one conversation, or of all; what another tab still writes is not among them.
export function entries(number = "") {
  const wanted = names().filter((name) => !number || name.startsWith(nameOf(number, "")));
  const unsaved = wanted.map((name) => ({ ...JSON.parse(browser.read(name)), text: browser.read(name) }));
  return unsaved.filter((entry) => entry.until < Date.now());
}

export const isLeftToOthers = () => names().length > entries().length;

// Deleted on purpose: nobody sends it any more.
export function discard(number = "") {
  for (const name of names()) if (!number || name.startsWith(nameOf(number, ""))) browser.remove(name);
}
