// The conversations that are kept: open, search, rename, delete.

import { ago, api, confirm, t } from "./core.js";
import { byId, formOf } from "./chat_options.js";
import { makeMessage } from "./chat_thread.js";

const ADDRESS = "/admin/api/conversations";
const SEARCH_MS = 250;
let keys = 0;

const fresh = () => ({ key: (keys += 1), id: 0, title: "", messages: [] });

export const list = {
  conversations: [],
  current: fresh(),
  running: [], // conversations whose reply is still being written
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

  async readList() {
    const { conversations } = await api("GET", `${ADDRESS}?search=${encodeURIComponent(this.search.trim().slice(0, 200))}`);
    Object.assign(this, { conversations, isRead: true });
  },
  find() {
    clearTimeout(this.finding);
    this.finding = setTimeout(() => this.attempt(() => this.readList()), SEARCH_MS);
  },

  begin() {
    this.enter(fresh());
  },
  async open(id) {
    const known = this.running.find((conversation) => conversation.id === id && id);
    if (known) return this.enter(known);
    await this.attempt(async () => {
      const { title, messages, options, model_id: model } = await api("GET", `${ADDRESS}/${id}`);
      this.enter({ ...fresh(), id, title, model, options, messages: messages.map(makeMessage) });
      if (!this.conversations.some((each) => each.id === id)) await this.readList();
    });
  },
  // A reply that is being written goes on; its conversation is found again while it does.
  enter(conversation) {
    this.keepDraft();
    this.running = this.running.filter((each) => each.messages.some((message) => message.status === "writing"));
    if (this.isBusy) this.running.push(this.current);
    this.current = conversation;
    this.isListOpen = false;
    if (conversation.options) this.form = formOf(conversation.options);
    if (this.models.some((model) => model.id === conversation.model)) this.model = conversation.model;
    this.remember();
    this.restoreDraft();
    this.$nextTick(() => {
      this.follow(true);
      if (matchMedia("(pointer: fine)").matches) byId("draft").focus();
    });
  },
  // The address names the open conversation, so that a reload finds it.
  remember() {
    history.replaceState(null, "", this.current.id ? `#${this.current.id}` : location.pathname);
  },

  renameWords: ({ title }) => t("chat.rename_named", { title }),
  deleteWords: ({ title }) => t("chat.delete_named", { title }),
  rename(conversation) {
    Object.assign(this, { renamed: conversation.id, newTitle: conversation.title });
    this.$nextTick(() => byId(`title-${conversation.id}`)?.select());
  },
  async saveTitle(conversation) {
    const title = this.newTitle.trim().slice(0, 200);
    if (this.renamed !== conversation.id) return;
    this.renamed = 0;
    if (!title || title === conversation.title) return;
    const isDone = await this.attempt(() => api("PATCH", this.path(conversation), { title }));
    if (!isDone) return;
    if (this.isCurrent(conversation)) this.current.title = title;
    await this.attempt(() => this.readList());
  },
  keepTitle() {
    this.renamed = 0;
  },
  async remove(conversation) {
    const title = t("chat.delete_title", { title: conversation.title });
    if (!(await confirm({ title, text: t("chat.delete_text"), action: t("chat.delete"), tone: "bad" }))) return;
    const isDone = await this.attempt(() => api("DELETE", this.path(conversation)));
    if (isDone) this.forget((each) => each.id === conversation.id);
  },
  async removeAll() {
    const title = t("chat.delete_all_title");
    if (!(await confirm({ title, text: t("chat.delete_text"), action: t("chat.delete_all"), tone: "bad" }))) return;
    if (await this.attempt(() => api("DELETE", ADDRESS))) this.forget(() => true);
  },
  // They are gone from the store: their replies need no more writing.
  forget(isGone) {
    for (const each of [this.current, ...this.running].filter(isGone)) {
      each.isDeleted = true;
      this.stop(each);
    }
    if (isGone(this.current)) this.begin();
    return this.attempt(() => this.readList());
  },
};
