// The settings of the server: the origin of each value, and when a change takes effect.

import { api, bytes, component, confirm, data, link, live, number, readNumber, seconds, t, toast } from "./core.js";
import { follow, lines, settingRow } from "./setting_form.js";

const ADDRESS = "/admin/api/settings";
const SAVED = {
  now: () => t("settings.saved_now"),
  reload: () => t("settings.saved_reload"),
  restart: () => t("settings.saved_restart"),
};
const GIGABYTE = 1e9;

// `shown` converts a value to the content of its field; `sent` converts the content to the value to send.
const shown = {
  list: (value) => value.join("\n"),
  pairs: (value) => Object.entries(value).map(([main, draft]) => `${main}=${draft}`).join("\n"),
  json: (value) => (value ? JSON.stringify(value) : ""),
  switch: (value) => value,
  size: (value) => (value === null ? "" : String(value / GIGABYTE)),
};

const sent = {
  list: (text) => lines(text),
  pairs: (text) => lines(text).join(","),
  switch: (value) => value,
  number: (text, { whole }) => readNumber(text, { whole }),
  size(text) {
    const gigabytes = readNumber(text);
    return gigabytes === null ? null : Math.round(gigabytes * GIGABYTE);
  },
};

// Formats a size or a duration for people; empty for other values.
function said(row, value) {
  if (typeof value !== "number") return "";
  if (row.unit === "bytes") return bytes(value);
  return row.unit === "seconds" ? seconds(value) : "";
}

component("setting", () => settingRow({
  // A default is the field's placeholder, not text to edit.
  show: (row) =>
    row.origin === "default" && !["switch", "choice"].includes(row.kind)
      ? ""
      : (shown[row.kind] ?? ((value) => (value === null ? "" : String(value))))(row.value),
  read: (row, value) => (sent[row.kind] ?? ((text) => text.trim()))(value, row),

  async send(value) {
    const { changed } = await api("PATCH", ADDRESS, { [this.row.name]: value });
    this.take(changed[0]);
    toast(SAVED[this.row.takes_effect](), "good");
  },

  get isGiven() {
    return this.row.origin === "environment" || this.row.origin === "command line";
  },

  get isLocked() {
    return !this.row.may_be_stored || this.isGiven;
  },

  get isStored() {
    return this.row.stored !== null;
  },

  get waits() {
    return !this.row.in_effect;
  },

  // The value that applies while the field is empty.
  get usual() {
    const { kind, name, unit, default: usual } = this.row;
    if (unit === "bytes" && data.automatic[name]) return t("settings.automatic_value", { value: number(data.automatic[name] / GIGABYTE, 1) });
    if (usual === null && ["number", "size"].includes(kind)) return t("settings.automatic");
    if (unit === "seconds") return seconds(usual);
    return usual === null || typeof usual === "object" ? "" : String(usual);
  },

  get slid() {
    return this.value.replace(",", ".") || (data.automatic[this.row.name] ?? 0) / GIGABYTE;
  },

  get note() {
    if (this.row.origin === "environment") return t("settings.from_environment", { variable: this.row.variable });
    if (this.row.origin === "command line") return t("settings.from_command_line");
    return this.row.origin === "default" ? "" : said(this.row, this.row.value);
  },
}));

const POLL_MS = 1000;
const RETURN_SECONDS = 120; // time for the server to start, after the time for its running requests

// Restarts the server and waits until all of its settings are in effect. If the port changes, the user must open the
// new address, because a page can reach only its own.
component("restart", () => ({
  isBusy: false,
  words: "",
  address: "",

  async restart() {
    const rows = data.settings;
    const grace = rows.find((row) => row.name === "drain_seconds").value;
    const text = grace ? t("settings.restart_text", { time: seconds(grace) }) : t("settings.restart_at_once");
    const wording = { title: t("settings.restart_title"), text, action: t("settings.restart") };
    if (!(await confirm(wording))) return;
    this.isBusy = true;
    try {
      const { new_port: port } = await api("POST", "/admin/api/restart");
      if (port !== null) this.leave(`${location.protocol}//${location.hostname}:${port}`);
      else await this.wait(grace + RETURN_SECONDS);
    } catch (error) {
      this.words = error.message;
    }
    this.isBusy = false;
  },

  leave(address) {
    Object.assign(this, { words: t("settings.restart_elsewhere"), address });
    link.isRestarting = true;
  },

  async wait(patience) {
    const began = Date.now();
    Object.assign(this, { words: t("settings.restarting"), address: "" });
    link.isRestarting = true;
    while (Date.now() - began < patience * 1000) {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      const answer = await api("GET", ADDRESS).catch(() => null); // no answer during the restart
      if (answer?.settings.every((row) => row.in_effect)) return location.reload();
    }
    this.words = t("settings.restart_failed");
    link.isRestarting = false;
    return null;
  },
}));

// Words for the outcome of an update check.
const OUTCOMES = {
  newer: (version) => t("updates.newer", { version }),
  latest: () => t("updates.latest"),
  unreachable: () => t("updates.unreachable"),
};

component("updates", () => ({
  words: "",

  init() {
    live("updates", ({ outcome, newer }) => (this.words = OUTCOMES[outcome]?.(newer) ?? ""));
  },
}));

// Shows only settings whose text, or section title, contains all of the typed words.
component("find", () => ({
  words: "",

  narrow(event) {
    const wanted = event.target.value.toLowerCase().split(/\s+/);
    const fits = (node) => wanted.every((word) => node.textContent.toLowerCase().includes(word));
    const sections = [...document.querySelectorAll("section.card")];
    for (const section of sections) {
      const rows = [...section.querySelectorAll(".setting")];
      for (const row of rows) row.hidden = !fits(row) && !fits(section.querySelector("h2"));
      section.hidden = rows.length ? rows.every((row) => row.hidden) : !fits(section);
    }
    this.words = sections.every((section) => section.hidden) ? t("settings.no_match") : "";
  },
}));

follow(ADDRESS);
