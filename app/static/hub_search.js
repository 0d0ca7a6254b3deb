// Search on the hub: results, the disk space and memory of a repository, and the access token.

import { api, attempt, component, data, latestOnly, t, toast } from "./core.js";
import { detailFacts, foundRow, problemWords } from "./download_words.js";

const beginSearch = latestOnly();
const TOKENS = {
  paceline: () => t("downloads.token_ours"),
  hugging_face: () => t("downloads.token_theirs"),
  none: () => t("downloads.token_none"),
};

component("hub", () => ({
  query: "",
  sort: "downloads",
  rows: [],
  problem: "",
  reachWords: "",
  isSearching: false,
  isSearched: false,

  init() {
    this.query = data?.query ?? "";
    return this.query ? this.search() : this.reach();
  },

  // Reports an unreachable hub before the user types.
  async reach() {
    const isLatest = beginSearch();
    const { problem } = await api("GET", "/admin/api/hub").catch(() => ({ problem: "" }));
    if (problem && isLatest()) this.reachWords = problemWords(problem);
  },

  get isEmpty() {
    return this.isSearched && !this.isSearching && !this.rows.length && !this.problem;
  },

  get statusWords() {
    if (this.isSearching) return t("downloads.searching");
    return this.isSearched && !this.problem ? t.n("downloads.found", this.rows.length) : this.reachWords;
  },

  async search() {
    const isLatest = beginSearch();
    Object.assign(this, { isSearching: true, problem: "", reachWords: "" });
    const parameters = new URLSearchParams({ q: this.query, sort: this.sort });
    try {
      const { results } = await api("GET", `/admin/api/hub/search?${parameters}`);
      if (isLatest()) this.rows = results.map(foundRow);
    } catch (error) {
      if (isLatest()) Object.assign(this, { rows: [], problem: error.message });
    }
    if (isLatest()) Object.assign(this, { isSearching: false, isSearched: true });
  },

  reorder() {
    return this.isSearched ? this.search() : undefined;
  },

  async look(row) {
    if (row.details) return void (row.details = null);
    Object.assign(row, { isLooking: true, problem: "" });
    try {
      const address = `/admin/api/hub/repository?id=${encodeURIComponent(row.repository)}`;
      row.details = detailFacts(await api("GET", address));
    } catch (error) {
      row.problem = error.message;
    }
    row.isLooking = false;
  },

  async get(row) {
    const body = { repository: row.repository, revision: row.details.commit };
    if (await attempt(() => api("POST", "/admin/api/downloads", body))) {
      row.details = null;
      toast(t("downloads.queued"), "good");
    }
  },
}));

component("token", () => ({
  origin: "",
  token: "",
  isBusy: false,

  async init() {
    await attempt(async () => {
      this.origin = (await api("GET", "/admin/api/hub/token")).origin;
    });
  },

  get originWords() {
    return TOKENS[this.origin]?.() ?? "";
  },

  get isOurs() {
    return this.origin === "paceline";
  },

  async keep(token) {
    if (this.isBusy) return;
    this.isBusy = true;
    await attempt(async () => {
      this.origin = (await api("PUT", "/admin/api/hub/token", { token })).origin;
      this.token = "";
    }, t("downloads.token_kept"));
    this.isBusy = false;
  },

  save() {
    return this.keep(this.token);
  },

  drop() {
    return this.keep("");
  },
}));
