// What the server has not acknowledged yet, in the browser's own storage: one entry for each turn, so that tabs do not
// overwrite each other. An entry is {number, version, begin, turn, until}; any tab may send it, more than once.

const PREFIX = "paceline.chat.unsaved.";
const WRITING_MS = 3000; // a tab that writes a reply renews its entry each second: until then it is left to it

const held = new Map(); // where the storage is full or closed: this page's own
const nameOf = (number, id) => `${PREFIX}${number}.${id}`;

export function put(entry, isWriting = false) {
  const name = nameOf(entry.number, entry.turn.id);
  const text = JSON.stringify({ ...entry, until: isWriting ? Date.now() + WRITING_MS : 0 });
  try {
    localStorage.setItem(name, text);
    held.delete(name);
  } catch {
    held.set(name, text);
  }
}

// Takes an entry away, unless it says something else by now.
export function drop(entry) {
  const name = nameOf(entry.number, entry.turn.id);
  if (textOf(name) !== entry.text) return;
  forget(name);
}

function forget(name) {
  held.delete(name);
  localStorage.removeItem(name);
}
const textOf = (name) => held.get(name) ?? localStorage.getItem(name);
const names = () => [...new Set([...Object.keys(localStorage), ...held.keys()])].filter((name) => name.startsWith(PREFIX));

// The entries of one conversation, or of all; what another tab still writes is not among them.
export function entries(number = "") {
  const wanted = names().filter((name) => !number || name.startsWith(nameOf(number, "")));
  const unsaved = wanted.map((name) => ({ ...JSON.parse(textOf(name)), text: textOf(name) }));
  return unsaved.filter((entry) => entry.until < Date.now());
}

export const isLeftToOthers = () => names().length > entries().length;

// Deleted on purpose: nobody sends it any more.
export function discard(number = "") {
  for (const name of names()) if (!number || name.startsWith(nameOf(number, ""))) forget(name);
}
