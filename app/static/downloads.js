// The queue of downloads and the recommended pairs.

import { api, attempt, bytes, component, confirm, live, reader, t, toast } from "./core.js";
import { downloadRow, sizeWords } from "./download_words.js";
import { filesCall, methodWords } from "./model_words.js";

const DOWNLOADS = "/admin/api/downloads";

component("downloads", () => ({
  rows: [],
  free: 0,
  folder: "",
  problem: "",
  isRead: false,

  init() {
    live("downloads", (value) => this.show(value));
    return this.read();
  },

  read: reader(
    () => api("GET", DOWNLOADS),
    function show(value) {
      this.show(value);
    },
  ),

  show({ downloads, free_bytes: free, folder }) {
    Object.assign(this, { rows: downloads.map(downloadRow), free, folder, isRead: true });
  },

  get isWaiting() {
    return !this.isRead && !this.problem;
  },

  get isEmpty() {
    return this.isRead && !this.rows.length;
  },

  get diskWords() {
    return this.isRead ? t("downloads.disk", { amount: bytes(this.free), folder: this.folder }) : "";
  },

  async change(row, verb) {
    await attempt(() => api("POST", `${DOWNLOADS}/${row.id}/${verb}`));
    await this.read();
  },

  pause(row) {
    return this.change(row, "pause");
  },

  resume(row) {
    return this.change(row, "resume");
  },

  retry(row) {
    return this.change(row, "retry");
  },

  up(row) {
    return this.change(row, "up");
  },

  down(row) {
    return this.change(row, "down");
  },

  async cancel(row) {
    const title = t("downloads.cancel_title", row.named);
    const wording = { title, text: t("downloads.cancel_text"), action: t("downloads.cancel_yes"), tone: "bad" };
    if (!row.done_bytes || (await confirm(wording))) await this.change(row, "cancel");
  },

  async forget(row) {
    await attempt(() => api("DELETE", `${DOWNLOADS}/${row.id}`));
    await this.read();
  },

  async remove(row) {
    const title = t("downloads.remove_title", row.named);
    const text = t("downloads.remove_text", { size: sizeWords(row.total_bytes) });
    if (!(await confirm({ title, text, action: t("downloads.remove"), tone: "bad" }))) return;
    const isGone = await attempt(() => api("DELETE", filesCall(row.repository)), t("downloads.removed", row.named));
    if (isGone) await this.forget(row);
  },
}));

component("pairs", () => ({
  pairs: [],
  ceiling: 0,
  problem: "",
  isRead: false,
  isBusy: false,

  // How much memory there is, a worker that starts only now tells later.
  init() {
    live("worker", ({ ready }) => {
      if (ready && this.isRead && !this.ceiling) this.read();
    });
    return this.read();
  },

  read: reader(
    () => api("GET", "/admin/api/hub/recommended"),
    function show({ pairs, memory_ceiling_bytes: ceiling }) {
      Object.assign(this, { pairs: pairs.map(pairRow), ceiling, isRead: true });
    },
  ),

  get isWaiting() {
    return !this.isRead && !this.problem;
  },

  get isEmpty() {
    return this.isRead && !this.pairs.length;
  },

  get lead() {
    return this.ceiling ? t("downloads.pairs_lead", { amount: bytes(this.ceiling) }) : t("downloads.pairs_unknown");
  },

  // Exact sizes and the room on the disk are told before anything is fetched.
  async get(pair) {
    if (this.isBusy) return;
    this.isBusy = true;
    try {
      const wanted = pair.missing.map((repository) => `/admin/api/hub/repository?id=${encodeURIComponent(repository)}`);
      const details = await Promise.all(wanted.map((address) => api("GET", address)));
      const total = details.reduce((sum, repository) => sum + repository.total_bytes, 0);
      const free = details[0].free_bytes;
      if (total > free) toast(t("downloads.no_room", { amount: bytes(total - free) }), "bad");
      else if (await confirm(pairQuestion(pair, total, free))) await order(pair);
    } catch (error) {
      toast(error.message, "bad");
    }
    this.isBusy = false;
  },
}));

function pairRow(pair) {
  const missing = [!pair.main_is_here && pair.main, !pair.draft_is_here && pair.draft].filter(Boolean);
  return {
    ...pair,
    missing,
    isHere: !missing.length,
    draftWords: pair.draft || t("downloads.pair_alone"),
    methodWords: pair.method ? methodWords(pair.method) : "",
    totalWords: t("downloads.about", { size: bytes(pair.main_bytes + pair.draft_bytes) }),
    getWords: t("downloads.pair_get_named", { name: pair.main }),
  };
}

function pairQuestion(pair, total, free) {
  const values = { size: bytes(total), free: bytes(free) };
  return {
    title: t("downloads.pair_title"),
    text: `${pair.missing.join(", ")}. ${t("downloads.pair_text", values)}`,
    action: t("downloads.get_size", values),
  };
}

async function order(pair) {
  for (const repository of pair.missing) {
    const drafts = repository === pair.draft ? { drafts_for: pair.main } : {};
    await api("POST", DOWNLOADS, { repository, ...drafts });
  }
  toast(t("downloads.queued"), "good");
}
