// Saves every turn: first in this browser, then on the server, with retries until the server acknowledges it. Turns of
// other tabs are merged. Each turn has an id, so that sending it again is idempotent.

import { api, t, toast } from "./core.js";
import { discard, drop, entries, isLeftToOthers, put } from "./chat_outbox.js";
import { sizeOf } from "./chat_text.js";
import { makeMessage, replyOf, stored } from "./chat_thread.js";
import { arrange, inOrder, newNumber, turnOf } from "./chat_tree.js";

export const ADDRESS = "/admin/api/conversations";
const RETRY_MS = 5000;
const MAX_LAST_CHARACTERS = 20_000; // browsers finish calls of up to 64 KiB after the page is closed
const deliveries = new Map(); // by conversation number: the last call of its queue
const versions = new Map(); // by conversation number, also for one that was left while being saved
let retry = 0;

export const mayOutlivePage = (body) => JSON.stringify(body).length < MAX_LAST_CHARACTERS;
const isWorthKeeping = (message) => message.status !== "writing";

async function send(number, version, waiting) {
  const body = { version, turns: inOrder(waiting.map((entry) => entry.turn)), begin: version ? null : waiting[0].begin };
  return api("POST", `${ADDRESS}/${number}/turns`, body, { keepalive: mayOutlivePage(body) });
}

export const keeping = {
  // Returns the conversation with this number if this page has it in memory, with turns.
  known(number) {
    const conversations = [this.current, ...this.running];
    return conversations.find((conversation) => conversation.id === number && conversation.turns.length);
  },
  keep(conversation, message) {
    const { id: number, version, title, model = "", options = {} } = conversation;
    if (conversation.isDeleted) return;
    put({ number, version, begin: { title, model, options }, turn: stored(message) }, message.status === "writing");
  },
  async keepAndSend(conversation, message) {
    this.keep(conversation, message);
    await this.deliver(conversation.id);
  },
  deliver(number) {
    return this.inTurn([number], () => this.sendWaiting(number));
  },
  // Makes a call after the queued calls for these conversations, whether those succeed or not.
  inTurn(numbers, call) {
    const next = Promise.allSettled(numbers.map((number) => deliveries.get(number))).then(call);
    for (const number of numbers) deliveries.set(number, next);
    return next;
  },
  // Lets saves in flight finish first, so that none revives the deleted conversation; drops the saves that still wait.
  async deleteKept(address, number) {
    await this.inTurn(number ? [number] : [this.current.id, ...deliveries.keys()], async () => {
      await api("DELETE", address);
      discard(number);
      this.forget(number);
    });
    await this.readList();
  },
  // Sends all waiting entries, of any tab.
  async flush() {
    clearTimeout(retry);
    const numbers = new Set(entries().map((entry) => entry.number));
    await Promise.all([...numbers].map((number) => this.deliver(number)));
    if (isLeftToOthers()) this.flushLater();
  },
  flushLater() {
    clearTimeout(retry);
    retry = setTimeout(() => this.flush(), RETRY_MS);
  },

  async sendWaiting(number) {
    const waiting = entries(number);
    if (!waiting.length) return;
    try {
      const version = this.known(number)?.version ?? versions.get(number) ?? waiting.at(-1).version;
      await this.acknowledge(number, waiting, await this.sendMerged(number, version, waiting));
    } catch (error) {
      if (error.status === 404) return this.revive(number, waiting);
      for (const { turn } of waiting) this.mark(number, turn.id, error);
      this.follow();
      if (!error.status || error.status >= 500) this.flushLater();
    }
  },
  // After a version conflict, merges what another tab wrote and sends again.
  async sendMerged(number, version, waiting) {
    try {
      return await send(number, version, waiting);
    } catch (error) {
      if (error.status !== 409) throw error;
      const present = error.answer.conversation;
      const conversation = this.known(number);
      if (conversation) this.merge(conversation, present);
      return this.sendMerged(number, present.version, waiting);
    }
  },
  async acknowledge(number, waiting, heading) {
    for (const entry of waiting) drop(entry);
    versions.set(number, heading.version);
    this.noteHeading(heading);
    const conversation = this.known(number);
    if (!conversation) return;
    conversation.version = heading.version;
    this.settle(conversation);
    await this.sendChange(conversation);
  },
  // Marks turns without a waiting entry as saved, whichever tab sent them.
  settle(conversation) {
    const waiting = new Set(entries(conversation.id).map((entry) => entry.turn.id));
    for (const turn of conversation.turns) if (!waiting.has(turn.id)) turn.unsaved = "";
  },
  mark(number, id, error) {
    const conversation = this.known(number);
    const message = conversation && turnOf(conversation, id);
    if (message) message.unsaved = error.status ? t("chat.unsaved_because", { reason: error.message }) : t("chat.unsaved");
  },

  // Adds what another tab wrote; the turns on screen stay on screen.
  merge(conversation, present) {
    const { version, title, model_id: model, options } = present;
    const here = new Map(conversation.turns.map((turn) => [turn.id, turn]));
    const line = present.turns.map((turn) => this.met(here.get(turn.id), turn));
    const kept = new Set(present.turns.map((turn) => turn.id));
    conversation.turns = [...line, ...conversation.turns.filter((turn) => !kept.has(turn.id))];
    Object.assign(conversation, { version, title, model, options }, conversation.change);
    this.settle(conversation);
    arrange(conversation);
  },
  // Merges a turn here with its stored version, which is longer if another tab has completed a reply that broke off.
  met(message, turn) {
    if (!message) return makeMessage(turn);
    const isLonger = sizeOf(turn) > sizeOf(replyOf(message));
    if (isLonger && message.status !== "writing") return Object.assign(message, makeMessage(turn), { version: message.version + 1 });
    return message;
  },
  // Adds turns that an earlier page saved in this browser and that still wait for the server.
  adopt(conversation) {
    for (const { begin, turn } of entries(conversation.id)) {
      if (!conversation.title) Object.assign(conversation, begin);
      if (!turnOf(conversation, turn.id)) conversation.turns.push({ ...makeMessage(turn), unsaved: t("chat.unsaved") });
    }
    arrange(conversation);
  },

  // Another tab deleted the conversation: drops it, or, if a user's message still waits, saves it under a new number.
  async revive(number, waiting) {
    if (!waiting.some((entry) => entry.turn.role === "user")) {
      discard(number);
      return this.forget(number);
    }
    const conversation = this.known(number);
    const fresh = newNumber();
    const turns = conversation ? conversation.turns.filter(isWorthKeeping).map(stored) : waiting.map((entry) => entry.turn);
    const ids = new Set(turns.map((turn) => turn.id));
    for (const turn of turns) {
      const parent = ids.has(turn.parent) ? turn.parent : "";
      put({ number: fresh, version: 0, begin: waiting[0].begin, turn: { ...turn, parent } });
    }
    discard(number); // only after each of its turns is saved under the new number
    if (conversation) Object.assign(conversation, { id: fresh, version: 0 });
    if (conversation?.key === this.current.key) this.remember();
    toast(t("chat.revived"));
    return this.deliver(fresh);
  },

  // Merges the conversation's stored version, if that has changed.
  refresh(conversation) {
    return this.inTurn([conversation.id], () => this.readAgain(conversation));
  },
  async readAgain(conversation) {
    if (!conversation.version || conversation.isDeleted) return;
    try {
      const present = await api("GET", this.path(conversation));
      if (present.version === conversation.version) return;
      this.merge(conversation, present);
      if (conversation.key === this.current.key && !conversation.change) this.enterOptions(present);
    } catch (error) {
      if (error.status === 404) await this.revive(conversation.id, entries(conversation.id));
    }
  },
  // Called after a change to any conversation, here or elsewhere, and after the server becomes reachable again.
  async followOthers() {
    await this.flush();
    for (const conversation of [this.current, ...this.running]) await this.sendChange(conversation);
    const conversations = await this.readList();
    if (Number(location.hash.slice(1)) !== this.current.id) await this.openNamed(); // an earlier attempt failed
    const { current } = this;
    const listed = conversations.find((heading) => heading.id === current.id);
    if (current.version && listed?.version !== current.version) await this.refresh(current);
  },
};

