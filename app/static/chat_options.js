// The options of a conversation: the fields of the side panel, and the request body made from them.

import { api, data, number, readNumber, t, toast } from "./core.js";
import { draftsAddress, liveStateOf, methodWords, stateOf } from "./model_words.js";
import { gainRow } from "./pays_words.js";
import { browser } from "./storage.js";

export const byId = (id) => document.getElementById(id);
// Whether there is a mouse, and thus most likely a keyboard; on a phone, a focused field opens one on the screen.
export const hasMouse = () => matchMedia("(pointer: fine)").matches;
export const focusDraft = () => hasMouse() && byId("draft").focus();
// Runs `work` after the next frame, once `x-show` has revealed its elements.
export const whenShown = (work) => requestAnimationFrame(() => setTimeout(work));

const NUMBERS = {
  temperature: { least: 0, most: 2 },
  top_p: { least: 0.01, most: 1 },
  top_k: { whole: true, least: 0, most: 2 ** 20 },
  min_p: { least: 0, most: 1 },
  max_tokens: { whole: true, least: 1, most: 2 ** 31 - 1 },
  seed: { whole: true, least: 0, most: Number.MAX_SAFE_INTEGER },
  num_draft_tokens: { whole: true, least: 1, most: 64 },
};
const SAMPLING = Object.keys(NUMBERS).filter((name) => name !== "num_draft_tokens");
const PLAYGROUND = ["format", "json_schema", "tools", "tool_choice", "thinking"];
const FIELDS = [...Object.keys(NUMBERS), "system", "method", ...PLAYGROUND];
const NAMED = "function:";
export const LAST_MODEL = "paceline.chat.model"; // the model used last in this browser
const SAVE_MS = 600;
const EXAMPLES = {
  json_schema: {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
    required: ["name", "age", "city"],
    additionalProperties: false,
  },
  tools: [
    {
      name: "get_weather",
      description: "The weather in a city, now.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  ],
};

const empty = () => Object.fromEntries(FIELDS.map((name) => [name, ""]));

// Returns the fields, as text, for stored options.
export const formOf = (options) => ({
  ...empty(),
  ...Object.fromEntries(Object.entries(options).map(([name, value]) => [name, String(value)])),
});

const problemOf = (read) => {
  try {
    read();
    return "";
  } catch (error) {
    return error.message;
  }
};
const numberProblem = (form, name) => problemOf(() => readNumber(form[name], NUMBERS[name]));

// Returns the options for the fields, without empty fields and invalid numbers.
export function optionsOf(form) {
  const isWrong = (name) => name in NUMBERS && numberProblem(form, name);
  const valueOf = (name) => (name in NUMBERS ? readNumber(form[name], NUMBERS[name]) : form[name].trim() || null);
  const given = FIELDS.filter((name) => !isWrong(name)).map((name) => [name, valueOf(name)]);
  return Object.fromEntries(given.filter(([, value]) => value !== null));
}

// Throws an error with a message for the user if the text is not JSON.
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(t("chat.invalid_json", { reason: error.message }));
  }
}
const jsonProblem = (text) => problemOf(() => text.trim() && parsed(text));

// Returns OpenAI tools from functions in the format of OpenAI or Anthropic, single or in a list.
const toolsOf = (text) =>
  [parsed(text)].flat().map((tool) => {
    if (tool?.function) return tool;
    const { name, description, parameters, input_schema: schema } = tool ?? {};
    return { type: "function", function: { name, description, parameters: parameters ?? schema } };
  });
function namesOf(text) {
  try {
    return toolsOf(text).map((tool) => tool.function.name).filter((name) => typeof name === "string" && name);
  } catch {
    return [];
  }
}
// Returns the `response_format`; the schema may have OpenAI's wrapper.
function formatOf({ format: type, json_schema: text = "" }) {
  if (type !== "json_schema") return { type };
  const entered = parsed(text);
  const schema = entered?.schema && !entered.type ? entered.schema : entered;
  return { type, json_schema: { name: "answer", schema } };
}
function heldTo(options) {
  const { format, tools, tool_choice: choice = "auto", thinking } = options;
  const named = choice.startsWith(NAMED) && { type: "function", function: { name: choice.slice(NAMED.length) } };
  return {
    ...(format && { response_format: formatOf(options) }),
    ...(tools && { tools: toolsOf(tools), tool_choice: named || choice }),
    ...(thinking && { thinking: { type: thinking } }),
  };
}

// Returns the request body. Throws an error with a message for the user if a field has an invalid value.
export function requestOf(model, form, messages) {
  for (const name of Object.keys(NUMBERS)) {
    const problem = numberProblem(form, name);
    if (problem) throw new Error(t("chat.wrong_option", { option: byId(`option-${name}`).labels[0].textContent, problem }));
  }
  const options = optionsOf(form);
  const { system, method, num_draft_tokens: length } = options;
  const sampling = Object.fromEntries(SAMPLING.filter((name) => name in options).map((name) => [name, options[name]]));
  const speculation = method === "off" ? { method } : { method: method ?? "auto", num_draft_tokens: length ?? null };
  const first = system ? [{ role: "system", content: system }] : [];
  return { model, messages: [...first, ...messages], ...sampling, ...heldTo(options), speculation };
}

// The part of the component for the panel.
export const panel = {
  form: empty(),
  model: "",
  models: [],
  gains: data.gains,
  state: null,
  areModelsRead: false,
  isPanelOpen: false,

  async readModels() {
    const { models } = await api("GET", "/admin/api/models");
    const usable = models.filter((model) => model.kind === "main" && !model.problem);
    const named = usable.map((model) => ({ ...model, words: model.chats ? model.id : `${model.id} · ${t("models.base")}` }));
    this.models = named.sort((left, right) => right.chats - left.chats);
    this.areModelsRead = true;
    const inMemory = this.models.filter(({ state }) => state === "loaded").map(({ id }) => id);
    const wanted = [this.model, this.preferred, browser.read(LAST_MODEL), ...inMemory, data.model];
    const matches = wanted.map((name) => this.models.find((model) => name && [model.id, model.alias].includes(name)));
    this.model = (matches.find(Boolean) ?? this.models[0])?.id ?? "";
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
  // The measured gain of drafting for this model, else its drafting methods.
  get gain() {
    const measured = gainRow(this.gains[this.model]);
    const methods = methodWords(this.drafts.map((draft) => draft.method).join("+"));
    if (measured?.method) return measured;
    return { short: methods || t("model.tab_drafts"), tone: "", words: measured?.words ?? t("drafts.unmeasured") };
  },
  get draftsPage() {
    return draftsAddress(this.model);
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

  get toolNames() {
    return namesOf(this.form.tools).map((name) => ({ name, choice: NAMED + name }));
  },
  get schemaProblem() {
    return jsonProblem(this.form.json_schema);
  },
  get toolsProblem() {
    return jsonProblem(this.form.tools);
  },
  wrong(name) {
    return numberProblem(this.form, name);
  },
  giveExample(name) {
    this.form[name] = JSON.stringify(EXAMPLES[name], null, 2);
    this.keepOptions();
    byId(`option-${name}`).focus();
  },

  // The value that applies while the field is empty.
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
  // Saves every change with its conversation: after `SAVE_MS`, or as soon as the user leaves the conversation or page.
  keepOptions() {
    const { current } = this;
    const change = { model: this.model, options: optionsOf(this.form) };
    Object.assign(current, change);
    if (!current.turns.length) return; // they are sent with its first turn
    current.change = change;
    clearTimeout(this.sending);
    this.sending = setTimeout(() => this.sendChange(current), SAVE_MS);
  },
  // The change stays pending until the server has acknowledged the conversation (`version` above 0), and while the
  // server cannot be reached.
  async sendChange(conversation) {
    const { change, version } = conversation;
    if (!change || !version) return;
    try {
      await this.change(conversation, change);
    } catch (error) {
      toast(error.message, "bad");
      if (![400, 404, 422].includes(error.status)) return;
    }
    if (conversation.change === change) conversation.change = null;
  },
  resetOptions() {
    this.form = empty();
    this.keepOptions();
  },
};
