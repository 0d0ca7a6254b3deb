// The saved conversations: open, search, rename, delete, export, import.

import { ago, api, confirm, isEnter, isEscape, latestOnly, t } from "./core.js";
import { ADDRESS, mayOutlivePage } from "./chat_keeping.js";
import { byId, focusDraft, formOf, whenShown } from "./chat_options.js";
import { entries } from "./chat_outbox.js";
import { stored, textOf } from "./chat_thread.js";
import { choose, newNumber } from "./chat_tree.js";
import { tab } from "./storage.js";

const SEARCH_MS = 250;
const SHOWN = "paceline.chat.shown"; // by conversation: the last turn of the line on screen
let begun = 0;
let read = 0;
const beginOpening = latestOnly();
let keys = 0;

// A conversation. `version` 0: the server does not have it yet. `messages`: the line of `turns` on screen, of which the
// first `hidden` ones are not drawn; `followers`: turns by parent id; `writing`: number of replies being streamed;
// `change`: chosen model and options that were not sent yet.
const fresh = (id = newNumber()) => ({
  key: (keys += 1), id, version: 0, title: "", turns: [], messages: [], followers: new Map(), hidden: 0, writing: 0, chosen: {}, change: null,
});
const beforeLast = ({ messages }) => Math.max(0, messages.length - SHOWN_MESSAGES);
const isAlive = ({ turns, change }) => change || turns.some((turn) => turn.status === "writing" || turn.unsaved);
const FORM = { format: "paceline.conversation", form: 1 };
const MAX_FILE_BYTES = 30e6;
const MAX_NAME_CHARACTERS = 60;
const SHOWN_MESSAGES = 40;
const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, MAX_NAME_CHARACTERS) || "chat";

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Reads an exported file. Throws an error with a message for the user if the file is something else.
async function readExport(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(t("chat.import_large"));
  try {
    const whole = JSON.parse(await file.text());
    if (whole.format === FORM.format && whole.form === FORM.form) return whole;
  } catch {
    // not JSON: reported below
  }
  throw new Error(t("chat.import_foreign"));
}

const readShown = () => JSON.parse(tab.read(SHOWN) ?? "{}");

export const list = {
  conversations: [],
  current: fresh(),
  running: [], // other conversations with a reply still being streamed, or not saved yet
  search: "",
  isRead: false,
  isListOpen: false,
  renamed: 0,
  newTitle: "",

  path: (conversation) => `${ADDRESS}/${conversation.id}`,
  agoOf: (conversation) => ago(conversation.changed_at),
  isCurrent(conversation) {
    return conversation.id === this.current.id;
  },
  get isEmpty() {
    return this.isRead && !this.conversations.length;
  },
  get emptyWords() {
    return this.search.trim() ? t("chat.no_match") : t("chat.no_conversations");
  },

  // If answers overtake one another, shows the answer of the latest call that succeeded.
  async readList() {
    const number = (begun += 1);
    const search = encodeURIComponent(this.search.trim().slice(0, 200));
    const { conversations } = await api("GET", `${ADDRESS}?search=${search}`);
    if (number < read) return conversations;
    read = number;
    this.arrangeList(conversations);
    this.isRead = true;
    return conversations;
  },
  // Puts a changed conversation at the top of the list.
  noteHeading(heading) {
    this.arrangeList([heading, ...this.conversations.filter((listed) => listed.id !== heading.id)]);
  },
  // While a title is being typed, the order stays: a field that moves loses the focus.
  arrangeList(conversations) {
    const places = new Map(this.renamed ? this.conversations.map(({ id }, at) => [id, at]) : []);
    const placeOf = ({ id }) => places.get(id) ?? places.size;
    this.conversations = conversations.toSorted((left, right) => placeOf(left) - placeOf(right));
  },
  find() {
    clearTimeout(this.finding);
    this.finding = setTimeout(() => this.attempt(() => this.readList()), SEARCH_MS);
  },

  // Shows the last messages, and earlier ones when the user scrolls to them: drawing all would freeze the page.
  get firstShown() {
    return Math.min(this.current.hidden, beforeLast(this.current));
  },
  get shown() {
    return this.current.messages.slice(this.firstShown);
  },
  hideEarlier(conversation) {
    conversation.hidden = beforeLast(conversation);
  },
  // Keeps the scroll position of the messages on screen.
  showEarlier() {
    const thread = byId("chat-thread");
    const below = thread.scrollHeight - thread.scrollTop;
    this.current.hidden = Math.max(0, this.firstShown - SHOWN_MESSAGES);
    this.$nextTick(() => (thread.scrollTop = thread.scrollHeight - below));
  },

  begin() {
    beginOpening();
    this.enter(fresh());
  },
  // Shows the conversation only if no other one was requested while it was loading.
  async open(id) {
    const isLatest = beginOpening();
    const known = this.known(id);
    if (known) {
      this.enter(known);
      return this.refresh(known);
    }
    await this.attempt(async () => {
      const conversation = fresh(id);
      const present = await this.readOne(conversation);
      if (!isLatest()) return;
      if (present) this.merge(conversation, present);
      this.adopt(conversation);
      const last = conversation.turns.find((turn) => turn.id === readShown()[id]) ?? conversation.turns.at(-1);
      if (last) choose(conversation, last.id);
      this.hideEarlier(conversation);
      this.enter(conversation);
      await this.deliver(id);
      const { current } = this; // the reactive proxy of `conversation`
      if (current.id === id) for (const turn of current.turns.filter(this.isBegun)) this.goOn(current, turn);
    });
  },
  // Returns the server's copy, or null while only this browser has the conversation.
  async readOne(conversation) {
    try {
      return await api("GET", this.path(conversation));
    } catch (error) {
      if (entries(conversation.id).length) return null;
      if (error.status === 404) this.remember(); // the address names the conversation on screen again
      throw error;
    }
  },
  // Shows a conversation; the one left stays in `running` while a reply is being streamed or saved.
  enter(conversation) {
    this.sendChange(this.current);
    this.keepDraft();
    this.keepShown();
    this.running = this.running.filter((other) => isAlive(other) && other.key !== this.current.key);
    if (isAlive(this.current)) this.running.push(this.current);
    this.current = conversation;
    this.isListOpen = false;
    this.enterOptions(conversation);
    this.remember();
    this.restoreDraft();
    this.$nextTick(() => {
      this.follow(true);
      this.noteOthers();
      focusDraft();
    });
  },
  keepShown() {
    const last = this.current.messages.at(-1);
    if (last) tab.write(SHOWN, JSON.stringify({ ...readShown(), [this.current.id]: last.id }));
  },
  enterOptions({ options, model }) {
    this.form = formOf(options ?? {});
    if (this.models.some((listed) => listed.id === model)) this.model = model;
  },
  // The address names the open conversation, so that a reload finds it.
  remember() {
    history.replaceState(null, "", this.current.turns.length ? `#${this.current.id}` : location.pathname);
  },

  renameWords: ({ title }) => t("chat.rename_named", { title }),
  deleteWords: ({ title }) => t("chat.delete_named", { title }),
  rename(conversation) {
    Object.assign(this, { renamed: conversation.id, newTitle: conversation.title });
    this.$nextTick(() => byId(`title-${conversation.id}`)?.select());
  },
  async typeTitle(conversation, event) {
    if (!isEnter(event) && !isEscape(event)) return;
    event.preventDefault(); // else Escape would also stop a reply
    if (isEscape(event)) this.newTitle = conversation.title;
    await this.saveTitle(conversation);
    this.focusEntry(conversation.id);
  },
  // Focuses an entry, or the search if it is gone, unless the user has gone on to something else.
  focusEntry(id) {
    whenShown(() => document.activeElement === document.body && (byId(`open-${id}`) ?? byId("chat-search")).focus());
  },
  async saveTitle(conversation) {
    const title = this.newTitle.trim().slice(0, 200);
    if (this.renamed !== conversation.id) return;
    this.renamed = 0;
    if (title && title !== conversation.title) {
      if (this.isCurrent(conversation)) this.current.title = title;
      await this.attempt(() => this.change(conversation, { title }));
    }
    await this.attempt(() => this.readList());
  },
  async change(conversation, values) {
    const { version } = await api("PATCH", this.path(conversation), values, { keepalive: mayOutlivePage(values) });
    const known = this.known(conversation.id);
    if (known?.version === version - 1) known.version = version;
  },
  async remove(conversation) {
    const title = t("chat.delete_title", { title: conversation.title });
    if (!(await confirm({ title, text: t("chat.delete_text"), action: t("chat.delete"), tone: "bad" }))) return;
    const at = this.conversations.findIndex(({ id }) => id === conversation.id);
    await this.attempt(() => this.deleteKept(this.path(conversation), conversation.id));
    this.focusEntry((this.conversations[at] ?? this.conversations[at - 1])?.id);
  },
  async removeAll() {
    const title = t("chat.delete_all_title");
    if (!(await confirm({ title, text: t("chat.delete_text"), action: t("chat.delete_all"), tone: "bad" }))) return;
    await this.attempt(() => this.deleteKept(ADDRESS));
  },
  // Stops the replies of one deleted conversation, or of all.
  forget(number) {
    for (const conversation of [this.current, ...this.running].filter(({ id }) => !number || id === number)) {
      Object.assign(conversation, { isDeleted: true, change: null });
      this.stop(conversation);
    }
    if (this.current.isDeleted) this.begin();
  },

  exportJson() {
    const { title, model, options, turns } = this.current;
    const whole = { ...FORM, title, model: model ?? "", options: options ?? {}, turns: turns.map(stored) };
    save(`${fileName(title)}.json`, "application/json", `${JSON.stringify(whole, null, 2)}\n`);
  },
  exportMarkdown() {
    const { title, messages } = this.current;
    const parts = messages.map((message) => `## ${this.authorOf(message)}\n\n${textOf(message)}`);
    save(`${fileName(title)}.md`, "text/markdown", `${[`# ${title}`, ...parts].join("\n\n")}\n`);
  },
  pickFile: () => byId("chat-import").click(),
  // Imports a file that `exportJson` wrote, as a new conversation.
  async importFile(event) {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) await this.attempt(() => this.importText(file), t("chat.imported"));
  },
  async importText(file) {
    const { title, model, options, turns } = await readExport(file);
    const id = newNumber();
    try {
      await api("POST", `${ADDRESS}/${id}/turns`, { version: 0, turns, begin: { title, model, options } });
    } catch (error) {
      throw error.status === 400 ? new Error(t("chat.import_refused", { reason: error.message })) : error;
    }
    await this.readList();
    await this.open(id);
  },
};
