// The list of models: filtered, with live states; loads and unloads.

import { address, api, attempt, bytes, component, keepInAddress, live, liveChange, modelsChange, number, reader, t } from "./core.js";
import {
  bitWords, contextWords, draftsAddress, folderWords, liveStateOf, methodWords, nameAddress, parameterWords,
  stateOf, tooLargeWords,
} from "./model_words.js";

const LOOK_AGAIN_MS = 1000;
const KINDS = {
  main: (model) => model.kind !== "drafter",
  drafter: (model) => model.kind === "drafter",
  loaded: (model) => model.isLoaded || model.isLoading,
  all: () => true,
};
const USUAL = "main";

// Values for a loaded model whose folder is missing: it still answers requests, and can be unloaded.
const GONE = { kind: "main", chats: true, state: "available", model_type: "", alias: "", problem: "", size_bytes: 0, parameter_count: 0, bits: 0, context: 0 };

function row(model, now) {
  const state = now?.state ?? (["loaded", "loading"].includes(model.state) ? "available" : model.state);
  const { tone, words } = stateOf(state);
  const isMain = model.kind === "main";
  const drafts = now?.loaded?.drafts ?? model.drafts;
  return {
    ...model,
    state,
    tone,
    isMain,
    isBase: isMain && !model.chats && !model.problem,
    fraction: now?.fraction ?? 0,
    pinned: now?.loaded?.pinned ?? model.pinned,
    stateWords: words(),
    isLoading: state === "loading",
    isLoaded: state === "loaded",
    canLoad: model.kind !== "drafter" && state === "available",
    address: nameAddress(model),
    draftsAddress: draftsAddress(model.id),
    sizeWords: model.size_bytes ? bytes(model.size_bytes) : t("core.none"),
    weightWords: [parameterWords(model.parameter_count), bitWords(model.bits)].filter(Boolean).join(" · "),
    contextWords: contextWords(model.context),
    hasDrafts: isMain && state !== "unusable",
    draftWords: model.looking ? t("models.looking") : drafts.length ? drafts.map((draft) => draft.id).join(", ") : t("models.choose_draft"),
    roleWords: model.kind === "drafter" ? t("models.drafts_by", { method: methodWords(model.method) }) : t("models.embeds"),
    roomWords: state === "too_large" ? tooLargeWords(model.footprint) : "",
    loadWords: t("models.load_named", { model: model.id }),
    unloadWords: t("models.unload_named", { model: model.id }),
    loadingWords: t("models.loading_named", { model: model.id }),
  };
}

component("models", () => ({
  models: [],
  folders: [],
  state: null,
  filter: address("filter"),
  kind: Object.hasOwn(KINDS, address("kind")) ? address("kind") : USUAL,
  problem: "",
  isRead: false,

  init() {
    for (const name of ["filter", "kind"]) this.$watch(name, () => this.keep());
    live("state", (state) => (this.state = state));
    const unitsOf = ({ models, quarantined }) => [models.map(({ id, state, drafts }) => [id, state, drafts]), quarantined];
    liveChange("state", unitsOf, () => this.read());
    modelsChange(() => this.read());
    return this.read();
  },

  get isWaiting() {
    return !this.isRead && !this.problem;
  },
  get isEmpty() {
    return this.isRead && !this.models.length;
  },
  get isFilteredOut() {
    return this.models.length > 0 && !this.shown.length;
  },
  get rows() {
    const known = new Set(this.models.map(({ id }) => id));
    const gone = (this.isRead && this.state?.models.filter(({ id }) => !known.has(id))) || [];
    const models = [...this.models, ...gone.map(({ id, drafts }) => ({ ...GONE, id, drafts }))];
    return models.map((model) => row(model, this.state && liveStateOf(this.state, model.id)));
  },
  get shown() {
    const wanted = this.filter.trim().toLowerCase().split(/\s+/);
    const fits = (text) => wanted.every((word) => text.includes(word));
    return this.rows.filter(
      (model) => KINDS[this.kind](model) && fits(`${model.id} ${model.alias} ${model.model_type}`.toLowerCase()),
    );
  },
  get summary() {
    if (!this.isRead) return "";
    const models = this.rows.filter(KINDS[this.kind]);
    const size = models.reduce((sum, model) => sum + model.size_bytes, 0);
    return t.n("models.count", models.length, { size: bytes(size) });
  },

  folderWords,
  get badFolders() {
    return this.folders.filter(({ problem }) => problem);
  },

  read: reader(
    () => api("GET", "/admin/api/models"),
    function show({ models, folders }) {
      Object.assign(this, { models, folders, isRead: true });
      clearTimeout(this.lookingAgain);
      if (models.some((model) => model.looking)) this.lookingAgain = setTimeout(() => this.read(), LOOK_AGAIN_MS);
    },
  ),
  keep() {
    keepInAddress({ filter: this.filter, kind: this.kind === USUAL ? "" : this.kind });
  },
  showAll() {
    Object.assign(this, { filter: "", kind: "all" });
  },
  async load(model) {
    await attempt(() => api("POST", "/admin/api/models/load", { model: model.id }), t("models.is_loaded", { model: model.id }));
    await this.read();
  },
  async unload(model) {
    await attempt(() => api("POST", "/admin/api/models/unload", { model: model.id }), t("models.is_unloaded", { model: model.id }));
    await this.read();
  },
}));

component("prefixes", () => ({
  now: null,
  isBusy: false,

  init() {
    return this.read();
  },

  get isRead() {
    return this.now !== null;
  },
  get kept() {
    if (!this.now) return "";
    const { disk_bytes, memory_bytes, found_tokens } = this.now;
    return t("prefixes.kept", { disk: bytes(disk_bytes), memory: bytes(memory_bytes), tokens: number(found_tokens) });
  },
  get problem() {
    return this.now?.trouble ? t("prefixes.trouble", { reason: this.now.trouble }) : "";
  },

  async read() {
    await attempt(async () => {
      this.now = await api("GET", "/admin/api/prefixes");
    });
  },
  async clear() {
    this.isBusy = true;
    await attempt(() => api("POST", "/admin/api/prefixes/clear"), t("prefixes.cleared"));
    await this.read();
    this.isBusy = false;
  },
}));
