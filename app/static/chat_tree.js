// A conversation is a tree of turns: an edited message or a regenerated reply is a sibling, and the earlier one stays.
// The page shows one line, a path from a root to a leaf: `chosen` maps each turn to the follower that is shown.

const ID_BYTES = 16;

// The browser makes the id, so that a turn sent twice is stored once. (Without https there is no randomUUID.)
export function newTurnId() {
  const bytes = crypto.getRandomValues(new Uint8Array(ID_BYTES));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
export function newNumber() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return 1 + (high % 2 ** 16) * 2 ** 32 + low;
}

export const turnOf = (conversation, id) => conversation.turns.find((turn) => turn.id === id);

function byParent(turns) {
  const followers = new Map();
  for (const turn of turns) {
    if (followers.has(turn.parent)) followers.get(turn.parent).push(turn);
    else followers.set(turn.parent, [turn]);
  }
  return followers;
}

// Updates the line on screen, the choices that keep it there when turns are added, and the followers of each turn.
export function arrange(conversation) {
  const followers = byParent(conversation.turns);
  const line = [];
  for (let at = ""; followers.has(at); at = line.at(-1).id) {
    const turns = followers.get(at);
    const turn = turns.find((follower) => follower.id === conversation.chosen[at]) ?? turns.at(-1);
    conversation.chosen[at] = turn.id;
    line.push(turn);
  }
  Object.assign(conversation, { messages: line, followers });
}

// Returns the line from the root to a turn.
export function lineTo(conversation, id) {
  const turns = new Map(conversation.turns.map((turn) => [turn.id, turn]));
  const line = [];
  for (let turn = turns.get(id); turn; turn = turns.get(turn.parent)) line.push(turn);
  return line.reverse();
}

// Shows the line through a turn; from that turn on, earlier choices apply.
export function choose(conversation, id) {
  for (const turn of lineTo(conversation, id)) conversation.chosen[turn.parent] = turn.id;
  arrange(conversation);
}

export function add(conversation, turn) {
  conversation.turns.push(turn);
  choose(conversation, turn.id);
}

// Removes a reply that never began, because the session had ended.
export function remove(conversation, id) {
  conversation.turns = conversation.turns.filter((turn) => turn.id !== id);
  arrange(conversation);
}

// Returns turns with parents first; a turn whose parent is missing counts as a root.
export function inOrder(turns) {
  const followers = byParent(turns);
  const ids = new Set(turns.map((turn) => turn.id));
  const roots = turns.filter((turn) => !ids.has(turn.parent));
  const line = [...roots];
  for (let at = 0; at < line.length; at += 1) line.push(...(followers.get(line[at].id) ?? []));
  return line;
}
