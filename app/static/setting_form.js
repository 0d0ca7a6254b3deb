// One row of a form of settings: shows what the schema says and saves a change at once. What cannot be saved has the
// reason below it: text stays where it is, a switch or a choice goes back. A page adds how it shows, reads and sends a value, and what else it tells.

import { data, t } from "./core.js";

const rows = new Map(data.settings.map((row) => [row.name, row]));
const shown = new Map();

// Takes what was changed elsewhere; what somebody is writing here stays.
export function follow(settings) {
  for (const row of settings) shown.get(row.name)?.see(row);
}

export const lines = (text) => text.split(/[\n,]/).map((each) => each.trim()).filter(Boolean);

export const settingRow = (own) => Object.defineProperties({
  row: null,
  value: "",
  problem: "",
  isBusy: false,
  isLocked: false,

  init() {
    this.take(rows.get(this.$el.dataset.name));
    shown.set(this.row.name, this);
  },

  see(row) {
    if (this.value === this.show(this.row) && !this.isBusy) this.take(row);
    else this.row = row;
  },

  take(row) {
    this.row = row;
    this.value = this.show(row);
    this.problem = "";
  },

  get isWrong() {
    return this.problem !== "";
  },

  get switchWords() {
    return this.value ? t("settings.on") : t("settings.off");
  },

  save() {
    return this.keep(this.read(this.row, this.value));
  },

  reset() {
    return this.keep(null);
  },

  async keep(value) {
    if (this.isBusy) return;
    this.isBusy = true;
    try {
      await this.send(value);
    } catch (error) {
      this.problem = error.message;
      if (this.row.kind === "switch" || this.row.kind === "choice") this.value = this.show(this.row);
    }
    this.isBusy = false;
  },
}, Object.getOwnPropertyDescriptors(own));
