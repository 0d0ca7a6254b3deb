// Requests: running ones, live, above a list of ended ones, which can be filtered, extended into the past, and cleared.

import { address, api, attempt, component, confirm, data, keepInAddress, latestOnly, live, liveChange, number, t } from "./core.js";
import { callerWords, isFine, requestWords } from "./running.js";

const ADDRESS = "/admin/api/requests";
const beginFetch = latestOnly();

const seen = new Set([...data.page.requests, ...data.now.recent].map((request) => request.id));

function passes(request, model, outcome) {
  if (model && request.model !== model) return false;
  if (outcome === "fine") return isFine(request);
  if (outcome === "failed") return !isFine(request) && request.outcome !== "cancelled";
  return !outcome || request.outcome === outcome;
}

component("requests", () => ({
  ...requestWords,
  running: data.now.running,
  open: data.now.open,
  rows: data.page.requests,
  next: data.page.next,
  total: data.page.total,
  models: data.page.models,
  problem: data.problem,
  model: address("model"),
  outcome: address("outcome"),
  isBusy: false,

  init() {
    live("requests", (now) => this.take(now));
    liveChange("requests", ({ recent }) => !recent.length, () => this.read()); // the history was cleared elsewhere
  },

  get summary() {
    return `${t.n("requests.running", this.open)} · ${t.n("requests.remembered", this.total)}`;
  },
  get isEmpty() {
    return !this.problem && !this.total && !this.rows.length;
  },
  get isFilteredOut() {
    return !this.problem && this.total > 0 && !this.rows.length;
  },
  tokens: (request) =>
    t("requests.token_counts", { prompt: number(request.prompt_tokens), written: number(request.completion_tokens) }),
  keyWords: (request) => t("requests.by_key", { name: callerWords(request.key) }),
  caller: (request) => callerWords(request.key),
  cancelWords: (request) => t("requests.cancel_named", { model: request.model }),

  // Puts requests that ended meanwhile on top, unless the filter excludes them.
  take(now) {
    this.running = now.running;
    this.open = now.open;
    const newer = new Map(now.recent.map((request) => [request.id, request]));
    this.rows = this.rows.map((row) => newer.get(row.id) ?? row);
    const fresh = now.recent.filter((request) => !seen.has(request.id));
    fresh.forEach((request) => seen.add(request.id));
    if (fresh.length > 1 && fresh.length === now.recent.length) return this.read();
    this.total += fresh.length;
    this.rows = [...fresh.filter((request) => passes(request, this.model, this.outcome)), ...this.rows];
    const unknown = fresh.map((request) => request.model).filter((name) => !this.models.includes(name));
    if (!unknown.length) return null;
    return (this.models = [...new Set([...this.models, ...unknown])].sort());
  },

  async read() {
    keepInAddress({ model: this.model, outcome: this.outcome });
    await this.fetch("", (page) => Object.assign(this, { rows: page.requests, models: page.models, total: page.total }));
  },

  async readMore() {
    await this.fetch(this.next, (page) => (this.rows = [...this.rows, ...page.requests]));
  },

  async fetch(before, take) {
    this.isBusy = true;
    const isLatest = beginFetch();
    const asked = new URLSearchParams({ before, model: this.model, outcome: this.outcome });
    try {
      const page = await api("GET", `${ADDRESS}?${asked}`);
      if (!isLatest()) return;
      page.requests.forEach((request) => seen.add(request.id));
      take(page);
      this.next = page.next;
      this.problem = "";
    } catch (error) {
      if (!isLatest()) return;
      this.problem = error.message;
    }
    this.isBusy = false;
  },

  async showAll() {
    this.model = this.outcome = "";
    await this.read();
  },

  async cancel(request) {
    const wording = { title: t("requests.cancel_title"), text: t("requests.cancel_text"), action: t("requests.cancel_yes") };
    if (!(await confirm({ ...wording, tone: "bad" }))) return;
    await attempt(() => api("POST", `${ADDRESS}/${encodeURIComponent(request.id)}/cancel`), t("requests.cancelled"));
  },

  async clear() {
    const wording = { title: t("requests.clear_title"), text: t("requests.clear_text"), action: t("requests.clear") };
    if (!(await confirm({ ...wording, tone: "bad" }))) return;
    if (await attempt(() => api("DELETE", ADDRESS), t("requests.cleared"))) await this.showAll();
  },
}));
