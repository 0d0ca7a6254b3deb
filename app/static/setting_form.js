// One row of a settings form: shows a setting and saves each change immediately. If that fails, the reason appears
// below; typed text stays, but a switch, a choice or a list returns to its old value. Each page adds functions that
// show, read and send a value, and its own words.

import { api, data, isEnter, latestOnly, settingsChange, t } from "./core.js";
import { folderWords } from "./model_words.js";

const rows = new Map(data.settings.map((row) => [row.name, row]));
const shown = new Map();

// Reads changes by other tabs, browsers or the terminal from this address; a value that the user is editing here stays.
export function follow(address) {
  const begin = latestOnly();
  settingsChange(async () => {
    const isLatest = begin();
    const answer = await api("GET", address).catch(() => null);
    if (isLatest()) for (const row of answer?.settings ?? []) shown.get(row.name)?.see(row);
  });
}

const TYPED = ["text", "number", "size", "json", "long_text"];
export const lines = (text) => text.split("\n").filter(Boolean);

export const settingRow = (own) => Object.defineProperties({
  row: null,
  value: "",
  added: "",
  problem: "",
  isBusy: false,
  waiting: [],
  sent: "",
  isLocked: false,

  init() {
    this.take(rows.get(this.$el.dataset.name));
    shown.set(this.row.name, this);
  },

  see(row) {
    if (this.value === this.show(this.row) && !this.isBusy) this.take(row);
    else this.row = row;
  },

  // Text that is typed while a change is being saved stays, too.
  take(row) {
    this.row = row;
    if (!this.isBusy || this.value === this.sent) this.value = this.show(row);
  },

  get isWrong() {
    return this.problem !== "";
  },

  get switchWords() {
    return this.value ? t("settings.on") : t("settings.off");
  },

  // The value of a list has one entry a line; a new entry stays in its field until it is saved.
  get entries() {
    return lines(this.value);
  },
  problemOf(entry) {
    const place = this.row.name === "model_dirs" && data.folders?.find(({ folder }) => folder === entry);
    return place?.problem ? folderWords(place) : "";
  },
  dropWords: (entry) => t("settings.remove_entry", { entry }),

  drop(entry) {
    this.value = this.entries.filter((other) => other !== entry).join("\n");
    return this.save();
  },

  async typeEntry(event) {
    if (!isEnter(event)) return;
    event.preventDefault();
    await this.add();
  },
  async add() {
    const entry = this.added.trim();
    if (!entry || this.isBusy) return;
    this.value = [...new Set([...this.entries, entry])].join("\n");
    await this.save();
    if (!this.problem) this.added = "";
  },

  slide(event) {
    this.value = event.target.value;
  },

  save() {
    try {
      return this.keep(this.read(this.row, this.value));
    } catch (error) {
      this.problem = error.message;
      return null;
    }
  },

  reset() {
    return this.keep(null);
  },

  // One call at a time: of changes made meanwhile, such as by a slider, only the last one is sent next.
  async keep(value) {
    this.waiting = [value];
    if (this.isBusy) return;
    this.isBusy = true;
    while (this.waiting.length) await this.sendNext();
    this.isBusy = false;
  },

  async sendNext() {
    this.sent = this.value;
    try {
      await this.send(this.waiting.pop());
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
      if (!TYPED.includes(this.row.kind)) this.value = this.show(this.row);
    }
  },
}, Object.getOwnPropertyDescriptors(own));
