// The live log: filtered by level, logger and text, paused, copied. Lines are shown as plain text.

import { address, api, component, copy, data, keepInAddress, language, live, t } from "./core.js";

const LEVELS = ["debug", "info", "warning", "error"];
const KEPT = 2000;
const SHOWN = 100;
const NEAR_PIXELS = 40;
const clock = new Intl.DateTimeFormat(language, { hour: "2-digit", minute: "2-digit", second: "2-digit" });

// Splits a line around a request id, which becomes a link.
function parted({ text, request }) {
  const at = request ? text.indexOf(request) : -1;
  if (at < 0) return { before: text, after: "", address: "" };
  const address = `/admin/requests/${encodeURIComponent(request)}`;
  return { before: text.slice(0, at), after: text.slice(at + request.length), address };
}

const lineOf = (line) => {
  const moment = new Date(line.at * 1000);
  return {
    ...line,
    clock: clock.format(moment),
    datetime: moment.toISOString(),
    ...parted(line),
    searchable: `${line.text}\n${line.trace}`.toLowerCase(),
  };
};

component("logs", () => ({
  lines: data.lines.map(lineOf),
  last: data.last,
  began: data.began,
  loggers: data.loggers,
  level: LEVELS.includes(address("level")) ? address("level") : "debug",
  logger: address("logger"),
  text: address("text"),
  most: SHOWN,
  isPaused: false,
  waiting: [],

  init() {
    let heard = Promise.resolve(); // one update at a time, because an update may first fetch missed lines
    live("logs", (news) => (heard = heard.then(() => this.hear(news))));
    this.$watch("filter", (filter) => keepInAddress(filter));
    this.$nextTick(() => this.follow(true));
  },

  get filter() {
    return { level: this.level === "debug" ? "" : this.level, logger: this.logger, text: this.text };
  },
  get passing() {
    const lowest = LEVELS.indexOf(this.level);
    const wanted = this.text.toLowerCase();
    return this.lines.filter(
      (line) =>
        LEVELS.indexOf(line.level) >= lowest && line.logger.startsWith(this.logger) && line.searchable.includes(wanted),
    );
  },
  // Shows the last lines, and earlier ones on demand: drawing all would freeze the page.
  get shown() {
    return this.passing.slice(-this.most);
  },
  get hasEarlier() {
    return this.passing.length > this.most;
  },
  showEarlier() {
    this.most += SHOWN * 2;
  },
  get isFiltered() {
    return this.lines.length > 0;
  },
  get emptyTitle() {
    return this.isFiltered ? t("logs.no_match") : t("logs.empty");
  },
  get emptyText() {
    return this.isFiltered ? t("logs.no_match_text") : t("logs.empty_text");
  },
  get summary() {
    if (this.isPaused) return t.n("logs.held_back", this.waiting.length);
    return t.n("logs.count", this.passing.length);
  },
  get pauseWords() {
    return this.isPaused ? t("logs.resume") : t("logs.pause");
  },
  get file() {
    return `/admin/api/logs/download?${new URLSearchParams({ ...this.filter, level: this.level })}`;
  },

  // Fetches lines that a slow tab missed; after a restart of the server, line numbers start again.
  async hear(news) {
    const isNewServer = news.began !== this.began;
    const first = news.lines.length ? news.lines[0].number : news.last + 1;
    const from = isNewServer ? 0 : this.last;
    const lines = first > from + 1 ? (await this.missed(from)) ?? news.lines : news.lines;
    const fresh = lines.filter((line) => line.number > from && line.number <= news.last);
    this.last = news.last;
    this.began = news.began;
    if (isNewServer) this.lines = this.waiting = [];
    this.waiting = [...this.waiting, ...fresh.map(lineOf)].slice(-KEPT);
    if (!this.isPaused) this.show();
  },

  missed: (after) =>
    api("GET", `/admin/api/logs?after=${after}&count=${KEPT}`).then((answer) => answer.lines, () => null),

  show() {
    if (!this.waiting.length) return;
    const unknown = this.waiting.map((line) => line.logger).filter((name) => !this.loggers.includes(name));
    if (unknown.length) this.loggers = [...new Set([...this.loggers, ...unknown])].sort();
    const wasAtEnd = this.isAtEnd();
    this.lines = [...this.lines, ...this.waiting].slice(-KEPT);
    this.waiting = [];
    this.$nextTick(() => this.follow(wasAtEnd));
  },

  isAtEnd() {
    const box = this.$refs.lines;
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PIXELS;
  },
  follow(wasAtEnd) {
    if (wasAtEnd) this.$refs.lines.scrollTop = this.$refs.lines.scrollHeight;
  },

  pause() {
    this.isPaused = !this.isPaused;
    if (!this.isPaused) this.show();
  },
  showAll() {
    Object.assign(this, { level: "debug", logger: "", text: "" });
  },
  take() {
    const text = this.passing.map((line) =>
      [`${line.datetime} ${line.level} ${line.logger} ${line.text}`, line.trace].filter(Boolean).join("\n"),
    );
    return copy(text.join("\n"));
  },
}));
