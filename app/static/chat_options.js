// What a conversation asks of its model: the side panel's fields, and the body of the request they make.

import { api, data, number, t } from "./core.js";
import { liveStateOf, methodWords, stateOf } from "./model_words.js";

export const byId = (id) => document.getElementById(id);

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "num_draft_tokens"];
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FIELDS = [...NUMBERS, "system", "method"];
const SAVE_MS = 600;

const empty = () => Object.fromEntries(FIELDS.map((name) => [name, ""]));

// Fields as text, from the options that are kept.
export const formOf = (options) => ({
  ...empty(),
  ...Object.fromEntries(Object.entries(options).map(([name, value]) => [name, String(value)])),
});

// Options without what is empty; a number that is none counts as empty.
export function optionsOf(form) {
  const valueOf = (name) => (NUMBERS.includes(name) ? Number.parseFloat(form[name]) : form[name].trim());
  const given = FIELDS.map((name) => [name, valueOf(name)]);
  return Object.fromEntries(given.filter(([, value]) => value !== "" && !Number.isNaN(value)));
}

export function requestOf(model, options, messages) {
  const { system, method, num_draft_tokens: length } = options;
  const sampling = Object.fromEntries(SAMPLING.filter((name) => name in options).map((name) => [name, options[name]]));
  const speculation = method === "off" ? { method } : { method: method ?? "auto", num_draft_tokens: length ?? null };
  const first = system ? [{ role: "system", content: system }] : [];
  return { model, messages: [...first, ...messages], ...sampling, speculation };
}

// The part of the component behind the panel.
export const panel = {
  form: empty(),
  model: "",
  models: [],
  state: null,
  areModelsRead: false,
  isPanelOpen: false,
  saving: null,

  async readModels() {
    const { models } = await api("GET", "/admin/api/models");
    this.models = models.filter((model) => model.kind === "main" && !model.problem);
    this.areModelsRead = true;
    const wanted = [this.model, this.preferred];
    const named = wanted.map((name) => this.models.find((model) => name && [model.id, model.alias].includes(name)));
    this.model = (named.find(Boolean) ?? this.models.find((model) => model.chats) ?? this.models[0])?.id ?? "";
  },

  get chosen() {
    return this.models.find((model) => model.id === this.model) ?? null;
  },
  get now() {
    return this.state && liveStateOf(this.state, this.model);
  },
  get stateName() {
    return this.now?.state ?? (this.chosen?.state === "too_large" ? "too_large" : "available");
  },
  get stateTone() {
    return stateOf(this.stateName).tone;
  },
  get stateWords() {
    return stateOf(this.stateName).words();
  },
  get isLoading() {
    return this.stateName === "loading";
  },
  get fraction() {
    return this.now?.fraction ?? 0;
  },
  get drafts() {
    return this.now?.loaded?.drafts ?? this.chosen?.drafts ?? [];
  },
  get methods() {
    const ready = this.now?.loaded?.methods ?? [...this.drafts.map((draft) => draft.method), ...data.text_methods];
    const names = new Set([...ready, this.form.method].filter((name) => name && name !== "auto" && name !== "off"));
    return [...names].map((name) => ({ name, words: methodWords(name) }));
  },
  get mayDraft() {
    return this.form.method !== "off";
  },
  methodOf: (draft) => methodWords(draft.method),

  // What counts where the field is empty.
  usual(name) {
    const value = this.chosen?.settings[name];
    if (value !== undefined) return number(value, Number.isInteger(value) ? 0 : 2);
    if (name === "top_k" || name === "max_tokens") return t("chat.no_limit");
    return { temperature: "1", top_p: "1", min_p: "0", seed: t("chat.random"), num_draft_tokens: t("chat.method_auto") }[name];
  },

  choose(event) {
    this.model = event.target.value;
    this.keepOptions();
  },
  // Every change is kept with its conversation, a moment later.
  keepOptions() {
    clearTimeout(this.saving);
    const { current } = this;
    const change = { model: this.model, options: optionsOf(this.form) };
    Object.assign(current, change);
    if (!current.version) return;
    this.saving = setTimeout(async () => {
      await this.attempt(() => this.change(current, change));
      this.saving = null;
    }, SAVE_MS);
  },
  resetOptions() {
    this.form = empty();
    this.keepOptions();
  },
};
