// One row of a form of settings: shows what the schema says and saves a change at once. Text that cannot be saved stays
// where it is, with the reason below it. A page adds how it shows, reads and sends a value, and what else it tells.

import { data, t } from "./core.js";

const rows = new Map(data.settings.map((row) => [row.name, row]));

export const lines = (text) => text.split(/[\n,]/).map((each) => each.trim()).filter(Boolean);

export const settingRow = (own) => Object.defineProperties({
  row: null,
  value: "",
  problem: "",
  isBusy: false,
  isLocked: false,

  init() {
    this.take(rows.get(this.$el.dataset.name));
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
    }
    this.isBusy = false;
  },
}, Object.getOwnPropertyDescriptors(own));
