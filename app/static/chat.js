// The chat page: combines its parts, keeps the unsent message, and handles the keyboard and scrolling.

import { attempt, component, isEnter, isEscape, live, modelsChange, number, t, toast } from "./core.js";
import { keeping } from "./chat_keeping.js";
import { list } from "./chat_list.js";
import { byId, focusDraft, panel } from "./chat_options.js";
import { messageOf, readFile, withFiles } from "./chat_text.js";
import { thread } from "./chat_thread.js";
import { browser, tab } from "./storage.js";

const VIEW = "paceline.chat.view";
const PANEL = "paceline.chat.panel";
const DRAFTS = "paceline.chat.drafts";
const NEAR_END = 60;
const NEAR_START = 600;
const MAX_FILE_CHARACTERS = 400_000; // in all files of a message; a character takes at most four bytes
const wide = matchMedia("(min-width: 1440px)"); // the settings are next to the conversation, not over it

const isTouched = matchMedia("(pointer: coarse)");

// Makes a field as high as its text, for browsers that lack `field-sizing` (Safari before 26.2).
function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}
const described = (part) => Object.getOwnPropertyDescriptors(part);
const readDrafts = () => JSON.parse(tab.read(DRAFTS) ?? "{}");

const page = {
  attempt,
  draft: "",
  files: [], // attached to the unsent message
  isDropping: false,
  helpId: isTouched.matches ? null : "draft-help", // about keys
  result: "", // typed for the tool call that a reply waits for
  view: browser.read(VIEW) ?? "markdown",
  announcement: "",
  opening: null,
  isAtEnd: true,
  problem: "",
  preferred: new URLSearchParams(location.search).get("model"),

  async init() {
    live("state", (state) => (this.state = state));
    live("measuring", ({ gains }) => (this.gains = gains));
    modelsChange(() => this.readModels().catch(() => null));
    const fit = () => (this.isPanelOpen = wide.matches && browser.read(PANEL) !== "closed");
    fit();
    wide.addEventListener("change", fit);
    if (!CSS.supports("field-sizing", "content")) this.$watch("draft", () => this.$nextTick(() => grow(byId("draft"))));
    this.restoreDraft();
    addEventListener("pagehide", () => this.leave());
    addEventListener("keydown", (event) => this.press(event));
    const navigation = document.querySelector(".side nav"); // at the bottom on a phone, where the page ends above it
    const measure = () => document.body.style.setProperty("--navigation", `${navigation.offsetHeight}px`);
    new ResizeObserver(measure).observe(navigation);
    this.opening = this.read().then(() => this.openNamed());
    addEventListener("hashchange", () => this.openNamed());
    addEventListener("storage", () => this.noteOthers());
    live("conversations", () => this.opening.then(() => this.followOthers()).catch(() => null));
    const isNew = !(await this.opening);
    if (isNew && document.activeElement === document.body) focusDraft();
  },
  async read() {
    try {
      await Promise.all([this.readModels(), this.readList()]);
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
  },
  // Opens the conversation that the address names.
  async openNamed() {
    const id = Number(location.hash.slice(1));
    if (!Number.isSafeInteger(id) || id <= 0) return false;
    await this.open(id);
    return true;
  },

  get titleWords() {
    return this.current.title || t("chat.new");
  },
  get isNew() {
    return !this.current.turns.length;
  },
  get noModels() {
    return this.areModelsRead && !this.models.length;
  },
  get isRaw() {
    return this.view === "tokens";
  },
  get showsLegend() {
    return this.usedMethods.length > 0 && (this.isRaw || this.isBusy);
  },
  setView(view) {
    this.view = view;
    browser.write(VIEW, view);
    this.$nextTick(() => this.follow());
  },
  toggleList() {
    this.isListOpen = !this.isListOpen;
    if (this.isListOpen) this.$nextTick(() => byId("chat-search").focus());
  },
  togglePanel() {
    this.isPanelOpen = !this.isPanelOpen;
    if (wide.matches) browser.write(PANEL, this.isPanelOpen ? "open" : "closed");
    else if (this.isPanelOpen) this.$nextTick(() => byId("option-method").focus());
  },
  closeDrawers() {
    this.isListOpen = false;
    if (!wide.matches) this.isPanelOpen = false;
  },

  type(event) {
    if (this.isSent(event)) this.send();
  },
  typeResult(event) {
    if (this.isSent(event)) this.sendResult();
  },
  // On a phone, the key starts a new line: its keyboard has no Shift + Enter, and the button to send is beside the field.
  isSent(event) {
    if (!isEnter(event) || event.shiftKey || isTouched.matches) return false;
    event.preventDefault();
    return true;
  },
  submit() {
    return this.isBusy ? this.stop(this.current) : this.send();
  },
  suggest(event) {
    this.draft = event.currentTarget.textContent;
    return this.send();
  },
  press(event) {
    if (!isEscape(event) || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.target.id === "chat-search" && this.search) return; // Escape empties the field
    if (this.isListOpen || (this.isPanelOpen && !wide.matches)) {
      byId(this.isListOpen ? "chat-menu" : "chat-more").focus();
      this.closeDrawers();
    } else if (this.isBusy) {
      this.stop(this.current);
      byId("draft").focus();
    }
  },

  // Files are attached as text: picked, pasted, or dropped anywhere on the page.
  pickText: () => byId("chat-files").click(),
  async attachPicked(event) {
    const files = [...event.target.files];
    event.target.value = "";
    await this.attach(files);
  },
  async paste(event) {
    const text = event.clipboardData.getData("text");
    // Office programs add a picture of the text.
    const files = [...event.clipboardData.files].filter(({ type }) => !text || !type.startsWith("image/"));
    if (!files.length) return this.pasteText(event);
    event.preventDefault();
    return this.attach(files);
  },
  // Refuses a text that the field would truncate silently.
  pasteText(event) {
    const { value, selectionStart, selectionEnd } = event.target;
    const kept = value.length - (selectionEnd - selectionStart);
    if (kept + event.clipboardData.getData("text").length <= MAX_FILE_CHARACTERS) return;
    event.preventDefault();
    toast(t("chat.paste_large", { count: number(MAX_FILE_CHARACTERS) }), "bad");
  },
  drag(event) {
    this.isDropping = event.dataTransfer.types.includes("Files");
    if (this.isDropping) event.preventDefault();
  },
  endDrag() {
    this.isDropping = false;
  },
  async drop(event) {
    this.isDropping = false;
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    await this.attach([...event.dataTransfer.files]);
  },
  async attach(files) {
    const { key } = this.current;
    const problems = [];
    for (const file of files) {
      const read = file.size > 4 * this.fileRoom ? null : await readFile(file).catch(() => ({ text: null }));
      if (this.current.key !== key) return; // another conversation is on screen by now
      if (read === null || read.text?.length > this.fileRoom) {
        problems.push(t("chat.file_large", { name: file.name, count: number(MAX_FILE_CHARACTERS) }));
      } else if (read.text === null) problems.push(t("chat.file_binary", { name: file.name }));
      else this.files = [...this.files, read];
    }
    if (problems.length) toast(problems.join(" "), "bad");
    this.keepDraft();
    byId("draft").focus();
  },
  get fileRoom() {
    return MAX_FILE_CHARACTERS - this.files.reduce((sum, attached) => sum + attached.text.length, 0);
  },
  detach(file) {
    this.files = this.files.filter((attached) => attached !== file);
    this.keepDraft();
    byId("draft").focus();
  },
  detachWords: ({ name }) => t("chat.detach", { name }),
  get hasNothing() {
    return !this.model || !(this.draft.trim() || this.files.length);
  },

  // Notes whether the end is in view: only then does the page follow new text. Near the start, shows earlier messages.
  scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = byId("chat-thread");
    this.isAtEnd = scrollTop + clientHeight > scrollHeight - NEAR_END;
    if (scrollTop < NEAR_START && this.firstShown) this.showEarlier();
  },
  follow(isWanted = false) {
    if (isWanted) this.isAtEnd = true;
    if (!this.isAtEnd) return;
    this.$nextTick(() => (byId("chat-thread").scrollTop = byId("chat-thread").scrollHeight));
  },
  toEnd() {
    this.follow(true);
    byId("draft").focus();
  },

  keepDraft() {
    const drafts = { ...readDrafts(), [this.draftKey]: withFiles(this.draft, this.files) };
    const written = Object.entries(drafts).filter(([, text]) => text);
    tab.write(DRAFTS, JSON.stringify(Object.fromEntries(written)));
  },
  restoreDraft() {
    const { text, files } = messageOf(readDrafts()[this.draftKey] ?? "");
    Object.assign(this, { draft: text, files, result: "" });
  },
  get draftKey() {
    return this.current.turns.length ? this.current.id : 0;
  },
  // Saves partial replies; they resume if the page is opened again soon.
  leave() {
    this.keepDraft();
    this.keepShown();
    this.sendChange(this.current);
    for (const conversation of [this.current, ...this.running]) this.keepUnfinished(conversation);
  },
};

component("chat", () =>
  [keeping, list, panel, thread].reduce((whole, part) => Object.defineProperties(whole, described(part)), Object.defineProperties({}, described(page))),
);
