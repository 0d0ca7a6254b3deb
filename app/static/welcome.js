// The first run: one step, the remaining ones, and the places where models were found.

import { api, attempt, bytes, component, data, live, remember, t } from "./core.js";
import { problemWords } from "./download_words.js";
import { folderWords } from "./model_words.js";

const ADDRESS = "/admin/api/welcome";
const NAMES = {
  lm_studio: () => t("welcome.lm_studio"),
  hugging_face: () => t("welcome.hugging_face"),
  embedded: () => t("welcome.embedded"),
};

// Whether the user named this folder. A missing downloads folder is no problem: the first download creates it.
const isNamed = (folder) => data.settings.some(({ value }) => value?.includes(folder));
const placeRow = ({ source, folder, problem, count, listed, bytes: size }) => ({
  key: source + folder,
  name: folder || NAMES[source](),
  words: problem && isNamed(folder) ? folderWords({ folder, problem }) : foundWords(count, listed, size),
});
function foundWords(count, listed, size) {
  if (count) return `${t.n("welcome.models_found", count)} · ${bytes(size)}`;
  return listed ? t.n("welcome.listed_above", listed) : t("welcome.none_found");
}

component("welcome", () => ({
  places: data.found.map(placeRow),
  problem: "",
  reachWords: "",
  nextAddress: data.next ? `/admin/welcome?step=${data.next}` : "/admin/",

  init() {
    this.$nextTick(() => this.$refs.title.focus());
    let changes = null;
    live("settings", (count) => {
      if (changes !== null && count !== changes) this.look();
      changes = count;
    });
    return data.step === "models" ? this.reach() : undefined;
  },

  async look() {
    const { found: places } = await api("GET", ADDRESS).catch(() => ({ found: null }));
    if (places) this.places = places.map(placeRow);
  },

  // Reports an unreachable hub before the user starts a download.
  async reach() {
    const { problem } = await api("GET", "/admin/api/hub").catch(() => ({ problem: "" }));
    if (problem) this.reachWords = problemWords(problem);
  },

  async speak(event) {
    const { language } = event.currentTarget.dataset;
    remember("language", language);
    await attempt(() => api("PATCH", "/admin/api/settings", { language }));
    location.reload();
  },

  async leaveFor(address) {
    if (await attempt(() => api("POST", ADDRESS, { done: data.step }))) location.assign(address);
  },
  finish() {
    return this.leaveFor(data.next ? this.nextAddress : "/admin/chat");
  },
  useEmbedded() {
    return this.leaveFor(`/admin/chat?model=${encodeURIComponent(data.starter)}`);
  },
}));
