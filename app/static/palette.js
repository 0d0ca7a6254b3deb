// ⌘K or Ctrl-K: a search over pages, models, settings and actions. Its pages are the links of the navigation. Its
// actions are the buttons with `data-command`, so a page adds an action by marking one of its buttons.

import { api, attempt, component, isEnter, t } from "./core.js";
import { draftsAddress, nameAddress, paysAddress } from "./model_words.js";

const go = (path) => () => location.assign(path);
const wordsOf = (node) => (node.getAttribute("aria-label") || node.textContent).trim();

function pages() {
  const links = [...document.querySelectorAll(".side nav a[href]")];
  const known = links.map((link) => ({ id: link.pathname, words: wordsOf(link), kind: t("palette.page"), run: () => link.click() }));
  return [...known, { id: "/admin/welcome", words: t("welcome.title"), kind: t("palette.page"), run: go("/admin/welcome?step=language") }];
}

function actions() {
  const buttons = [...document.querySelectorAll("button[data-command]")].filter((button) => !button.disabled);
  return buttons.map((button) => ({ id: wordsOf(button), words: wordsOf(button), kind: t("palette.action"), run: () => button.click() }));
}

const call = (verb, model, done) => () => attempt(() => api("POST", `/admin/api/models/${verb}`, { model }), done);

function commandsOf({ id, kind, state }) {
  const page = { id: `page ${id}`, words: id, kind: t("palette.model"), run: go(nameAddress({ id, kind })) };
  if (kind !== "main") return [page];
  const values = { model: id };
  const tab = (words, place) => ({ id: place, words: `${id} · ${words}`, kind: t("palette.page"), run: go(place) });
  const tabs = [tab(t("model.tab_drafts"), draftsAddress(id)), tab(t("model.tab_pays"), paysAddress(id))];
  const chat = { id: `chat ${id}`, words: t("palette.chat", values), kind: t("palette.action"), run: go(`/admin/chat?model=${encodeURIComponent(id)}`) };
  const load = { id: `load ${id}`, words: t("palette.load", values), kind: t("palette.action"), run: call("load", id, t("models.is_loaded", values)) };
  const unload = { id: `unload ${id}`, words: t("palette.unload", values), kind: t("palette.action"), run: call("unload", id, t("models.is_unloaded", values)) };
  return [page, ...tabs, ...{ loaded: [chat, unload], available: [chat, load] }[state] ?? []];
}

const settingOf = ({ name }) =>
  ({ id: `setting ${name}`, words: t.or(`settings.${name}`, name), kind: t("settings.title"), run: go(`/admin/settings#setting-${name}`) });

component("palette", () => ({
  query: "",
  at: 0,
  entries: [],

  init() {
    const isMac = /Mac|iP/.test(navigator.platform); // there, Ctrl-K deletes to the end of the line
    document.addEventListener("keydown", (event) => {
      const isHeld = isMac ? event.metaKey : event.ctrlKey;
      if (event.key.toLowerCase() !== "k" || !isHeld || event.altKey || event.shiftKey) return;
      event.preventDefault();
      if (this.$root.open) this.close();
      else if (!document.querySelector("dialog[open]")) this.show();
    });
    const button = document.querySelector("[data-palette]");
    button.addEventListener("click", () => this.show());
    if (!isMac) button.querySelector("kbd").textContent = "Ctrl K";
  },

  async show() {
    Object.assign(this, { query: "", at: 0, entries: [...pages(), ...actions()] });
    this.$root.showModal();
    const read = (name) => api("GET", `/admin/api/${name}`).then((answer) => answer[name]).catch(() => []);
    const [models, settings] = await Promise.all([read("models"), read("settings")]);
    const chosen = this.shown[this.at]?.id;
    this.entries = [...pages(), ...models.flatMap(commandsOf), ...actions(), ...settings.map(settingOf)];
    this.at = Math.max(0, this.shown.findIndex(({ id }) => id === chosen));
  },
  close() {
    this.$root.close();
  },

  get shown() {
    const terms = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    return this.entries.filter(({ words, kind }) => terms.every((term) => `${words} ${kind}`.toLowerCase().includes(term)));
  },
  get active() {
    return this.shown.length ? `palette-${this.at}` : "";
  },
  isAt(index) {
    return index === this.at;
  },
  optionId: (index) => `palette-${index}`,

  search(event) {
    this.query = event.target.value;
    this.at = 0;
  },
  steer(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const count = this.shown.length;
    if (step && count) {
      event.preventDefault();
      this.at = (this.at + step + count) % count;
      this.$nextTick(() => document.getElementById(this.active)?.scrollIntoView({ block: "nearest" }));
    } else if (isEnter(event) && count) {
      event.preventDefault();
      this.run(this.shown[this.at]);
    }
  },
  run(entry) {
    this.close();
    entry.run();
  },
  leaveByBackdrop(event) {
    if (event.target === this.$root) this.close();
  },
}));
