// The head of a page about one model: state, memory, load, unload, pin, default. Other components share its live state.

import { api, attempt, bytes, component, confirm, data, live, settingsChange, t } from "./core.js";
import {
  bitWords, contextWords, drafterWords, draftsCall, filesCall, liveStateOf, parameterWords, stateOf, tooLargeWords, usedBytes,
} from "./model_words.js";

const REST = ["loaded", "loading"];

component("modelHead", () => ({
  model: data.model,
  now: null,
  isKnown: false,

  init() {
    live("state", (state) => {
      this.now = liveStateOf(state, this.model.id);
      this.isKnown = true;
    });
    settingsChange(async () => {
      this.model = (await api("GET", draftsCall(this.model.id)).catch(() => this)).model;
    });
  },

  get state() {
    if (this.now) return this.now.state;
    if (!this.isKnown) return this.model.state;
    return REST.includes(this.model.state) ? "available" : this.model.state;
  },
  get tone() {
    return stateOf(this.state).tone;
  },
  get stateWords() {
    return stateOf(this.state).words();
  },
  get isDrafter() {
    return this.model.kind === "drafter";
  },
  get isLoading() {
    return this.state === "loading";
  },
  get fraction() {
    return this.now?.fraction ?? 0;
  },
  get isPinned() {
    return this.now?.loaded?.pinned ?? this.model.pinned;
  },
  get canLoad() {
    return !this.isDrafter && this.state === "available";
  },
  get canUnload() {
    return this.state === "loaded" || this.isLoading;
  },
  get canChoose() {
    return !this.isDrafter && !["unusable", "too_large"].includes(this.state);
  },
  get canBeDefault() {
    return this.canChoose && this.model.kind === "main" && !this.model.is_default;
  },
  get canRemove() {
    return this.model.is_downloaded && !this.canUnload;
  },
  get unloadWords() {
    return this.isLoading ? t("models.stop") : t("models.unload");
  },
  get pinWords() {
    return this.isPinned ? t("model.unpin") : t("model.pin");
  },
  get problem() {
    return this.state === "too_large" ? tooLargeWords(this.model.footprint) : this.model.problem;
  },
  get facts() {
    const { size_bytes: size, parameter_count: count, bits, context } = this.model;
    return [size ? bytes(size) : "", parameterWords(count), bitWords(bits), contextWords(context)].filter(Boolean).join(" · ");
  },

  get isInMemory() {
    return this.now?.loaded !== undefined;
  },
  get memoryTitle() {
    if (this.isInMemory) return t("model.memory_used");
    return this.model.drafts.length ? t("model.memory_alone") : t("model.memory_needed");
  },
  get memory() {
    if (this.isInMemory) return bytes(usedBytes(this.now.loaded));
    return this.model.footprint ? bytes(this.model.footprint.total_bytes) : t("core.none");
  },
  get drafters() {
    return drafterWords(this.now?.loaded?.drafts ?? this.model.drafts);
  },

  call(verb, done) {
    return attempt(() => api("POST", `/admin/api/models/${verb}`, { model: this.model.id }), done);
  },
  load() {
    return this.call("load", t("models.is_loaded", { model: this.model.id }));
  },
  unload() {
    return this.call("unload", t("models.is_unloaded", { model: this.model.id }));
  },
  async pin() {
    const pinned = !this.isPinned;
    if (!(await this.call(pinned ? "pin" : "unpin", pinned ? t("model.is_pinned") : t("model.is_unpinned")))) return;
    this.model.pinned = pinned;
    if (this.now?.loaded) this.now.loaded.pinned = pinned;
  },
  async remove() {
    const { id } = this.model;
    const wording = { title: t("model.remove_title", { model: id }), text: t("model.remove_text"), action: t("model.remove") };
    if (!(await confirm({ ...wording, tone: "bad" }))) return;
    if (await attempt(() => api("DELETE", filesCall(id)))) location.assign("/admin/models");
  },
  async makeDefault() {
    if (await this.call("default", t("model.is_default"))) this.model.is_default = true;
  },
}));
