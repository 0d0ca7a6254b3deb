// One component for each row of the settings form: shows what the schema says, saves a change at once, says when it is
// felt. Text that cannot be saved stays where it is, with the reason below it.

import { api, bytes, component, data, seconds, t, toast } from "./core.js";

const ADDRESS = "/admin/api/settings";
const rows = new Map(data.settings.map((row) => [row.name, row]));
const SAVED = {
  now: () => t("settings.saved_now"),
  reload: () => t("settings.saved_reload"),
  restart: () => t("settings.saved_restart"),
};

// What the field shows for a value, and what is sent for what the field shows.
const shown = {
  list: (value) => value.join("\n"),
  pairs: (value) => Object.entries(value).map(([main, draft]) => `${main}=${draft}`).join("\n"),
  json: (value) => (value ? JSON.stringify(value) : ""),
  switch: (value) => value,
};
const sent = {
  list: (text) => lines(text),
  pairs: (text) => lines(text).join(","),
  switch: (value) => value,
  number: (text) => (text === "" ? null : Number(text)),
};
const lines = (text) => text.split(/[\n,]/).map((each) => each.trim()).filter(Boolean);
const show = (row) => (shown[row.kind] ?? ((value) => (value === null ? "" : String(value))))(row.value);
const send = (row, value) => (sent[row.kind] ?? ((text) => text.trim()))(value);

// A size or a length of time as people say it.
function said(row, value) {
  if (typeof value !== "number") return "";
  if (row.unit === "bytes") return bytes(value);
  return row.unit === "seconds" ? seconds(value) : "";
}

component("setting", () => ({
  row: null,
  value: "",
  problem: "",
  isBusy: false,

  init() {
    this.take(rows.get(this.$el.dataset.name));
  },

  take(row) {
    this.row = row;
    this.value = show(row);
    this.problem = "";
  },

  get isLocked() {
    return !this.row.may_be_stored || this.isGiven;
  },

  get isGiven() {
    return this.row.origin === "environment" || this.row.origin === "command line";
  },

  get isStored() {
    return this.row.stored !== null;
  },

  get isWrong() {
    return this.problem !== "";
  },

  get waits() {
    return !this.row.in_effect;
  },

  get mayReset() {
    return this.row.stored !== null;
  },

  get usual() {
    return this.row.default === null || this.row.default === "" ? "" : String(this.row.default);
  },

  get switchWords() {
    return this.value ? t("settings.on") : t("settings.off");
  },

  get note() {
    if (this.row.origin === "environment") return t("settings.from_environment", { variable: this.row.variable });
    if (this.row.origin === "command line") return t("settings.from_command_line");
    return said(this.row, this.row.value);
  },

  save() {
    return this.keep(send(this.row, this.value));
  },

  reset() {
    return this.keep(null);
  },

  async keep(value) {
    if (this.isBusy) return;
    this.isBusy = true;
    try {
      const { changed } = await api("PATCH", ADDRESS, { [this.row.name]: value });
      this.take(changed[0]);
      toast(SAVED[this.row.takes_effect](), "good");
      felt(this.row);
    } catch (error) {
      this.problem = error.message;
    }
    this.isBusy = false;
  },
}));

// What this page itself can feel.
function felt(row) {
  if (row.name === "theme") document.documentElement.dataset.theme = row.value;
  if (row.name === "language") location.reload();
}
