// The queue of downloads and the recommended pairs.

import { api, attempt, bytes, component, confirm, live, modelsChange, number, reader, t, toast } from "./core.js";
import { downloadRow, sizeWords } from "./download_words.js";
import { filesCall, methodWords } from "./model_words.js";

const DOWNLOADS = "/admin/api/downloads";

component("downloads", () => ({
  rows: [],
  changing: 0, // the id of the download that is being changed: a double click changes it once
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
    if (this.changing === row.id) return;
    this.changing = row.id;
    await attempt(() => api("POST", `${DOWNLOADS}/${row.id}/${verb}`));
    await this.read();
    this.changing = 0;
  },

  pause(row) {
    return this.change(row, "pause");
  },

  resume(row) {
    return this.change(row, "resume");
  },

  reconnect(row) {
    return this.change(row, "reconnect");
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

  // What a failed download has fetched would serve another try, but goes with its row.
  async forget(row) {
    const title = t("downloads.forget_title", row.named);
    const wording = { title, text: t("downloads.forget_text", { size: bytes(row.done_bytes) }), action: t("downloads.forget"), tone: "bad" };
    if (row.state === "failed" && row.done_bytes && !(await confirm(wording))) return;
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

const UNDER_WAY = ["queued", "running", "paused"];

component("pairs", () => ({
  pairs: [],
  ceiling: 0,
  problem: "",
  isRead: false,
  isBusy: false,
  underWay: [],

  // A worker that is still starting reports the memory ceiling later, so the pairs are read again then.
  init() {
    live("worker", ({ ready }) => {
      if (ready && this.isRead && !this.ceiling) this.read();
    });
    live("downloads", ({ downloads }) => {
      this.underWay = downloads.filter(({ state }) => UNDER_WAY.includes(state)).map(({ repository }) => repository);
    });
    modelsChange(() => this.read());
    return this.read();
  },

  isUnderWay(pair) {
    return !pair.isHere && pair.missing.every((repository) => this.underWay.includes(repository));
  },

  read: reader(
    () => api("GET", "/admin/api/hub/recommended"),
    function show({ pairs, memory_ceiling_bytes: ceiling }) {
      Object.assign(this, { pairs: pairs.map(pairRow), ceiling, isRead: true });
    },
  ),

  get isWaiting() {
    return !this.ceiling && !this.problem;
  },

  get isEmpty() {
    return this.ceiling > 0 && !this.pairs.length;
  },

  get lead() {
    return this.ceiling ? t("downloads.pairs_lead", { amount: bytes(this.ceiling) }) : t("downloads.pairs_unknown");
  },

  // Shows exact sizes and free disk space before downloading. A drafter missing from the hub does not stop its model.
  async get(pair) {
    if (this.isBusy) return;
    this.isBusy = true;
    try {
      const looks = await Promise.allSettled(pair.missing.map(look));
      const isGone = ({ reason }, index) => reason?.code === GONE && pair.missing[index] !== pair.main && !pair.main_is_here;
      const refused = looks.find((result, index) => result.reason && !isGone(result, index));
      if (refused) throw refused.reason;
      const wanted = looks.flatMap(({ value }, index) => (value ? [{ ...value, repository: pair.missing[index] }] : []));
      const total = wanted.reduce((sum, repository) => sum + repository.total_bytes, 0);
      const free = wanted[0].free_bytes;
      if (total > free) toast(t("downloads.no_room", { amount: bytes(total - free) }), "bad");
      else if (await confirm(pairQuestion(pair, wanted, total, free))) await order(pair, wanted);
    } catch (error) {
      toast(error.message, "bad");
    }
    this.isBusy = false;
  },
}));

const GONE = "hub_not_found";
const look = (repository) => api("GET", `/admin/api/hub/repository?id=${encodeURIComponent(repository)}`);
const STRENGTHS = {
  quick: () => t("downloads.good_quick"),
  everyday: () => t("downloads.good_everyday"),
  all_round: () => t("downloads.good_all_round"),
  careful: () => t("downloads.good_careful"),
  agents: () => t("downloads.good_agents"),
  reasoning: () => t("downloads.good_reasoning"),
  knowledge: () => t("downloads.good_knowledge"),
};
const GUESSES = { dflash: () => t("downloads.guess_dflash"), draft_model: () => t("downloads.guess_draft_model") };

const drafterChoice = (drafter, index) => ({ ...drafter, choice: String(index) });

function pairRow(pair) {
  const speed = number(pair.tokens_per_second, pair.tokens_per_second < 10 ? 1 : 0);
  return {
    ...pair,
    drafters: pair.drafters.map(drafterChoice),
    choice: String(Math.max(0, pair.drafters.findIndex((drafter) => drafter.is_here))),
    strengthWords: STRENGTHS[pair.strength](),
    speedWords: t("downloads.pair_speed", { speed }),
    getWords: t(pair.drafters.length ? "downloads.pair_get_named" : "downloads.get_named", { name: pair.main }),
    hasChoice: pair.drafters.length > 1,

    get drafter() {
      return this.drafters[this.choice];
    },
    get missing() {
      return [!this.main_is_here && this.main, this.drafter && !this.drafter.is_here && this.drafter.repository].filter(Boolean);
    },
    get isHere() {
      return !this.missing.length;
    },
    get draftWords() {
      return this.drafter ? this.drafter.repository : "";
    },
    get guessWords() {
      return this.drafter ? GUESSES[this.drafter.method]() : t("downloads.pair_alone");
    },
    get methodWords() {
      return this.drafter ? methodWords(this.drafter.method) : "";
    },
    get totalWords() {
      return t("downloads.about", { size: bytes(this.main_bytes + (this.drafter?.size_bytes ?? 0)) });
    },
  };
}

function pairQuestion(pair, wanted, total, free) {
  const values = { size: bytes(total), free: bytes(free) };
  const names = wanted.map(({ repository }) => repository);
  const gone = pair.missing.filter((repository) => !names.includes(repository));
  const lost = gone.length ? ` ${t("downloads.pair_gone", { name: gone[0] })}` : "";
  return {
    title: wanted.length > 1 ? t("downloads.pair_title") : t("downloads.pair_title_one"),
    text: `${names.join(", ")}. ${t("downloads.pair_text", values)}${lost}`,
    action: t("downloads.get_size", values),
  };
}

async function order(pair, wanted) {
  for (const { repository } of wanted) {
    const drafts = repository === pair.main ? {} : { drafts_for: pair.main };
    await api("POST", DOWNLOADS, { repository, ...drafts });
  }
  toast(t("downloads.queued"), "good");
}
