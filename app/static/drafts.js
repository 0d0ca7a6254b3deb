// The draft picker: candidates ranked, one choice for the model, and one click from download to measurement.

import { api, attempt, bytes, component, data, live, liveChange, modelsChange, reader, readNumber, t, toast } from "./core.js";
import { candidateRow, offerRow } from "./draft_words.js";
import { becameWords, draftsCall, memoryWords, paysAddress } from "./model_words.js";
import { gainRow, MEASUREMENTS } from "./pays_words.js";

const LENGTHS = { whole: true, least: 1, most: 64 };
const POLICIES = { "": () => "", single: () => t("drafts.policy_single_text"), auto: () => t("drafts.policy_auto_text"), off: () => t("drafts.policy_off_text") };
const RULES = { "": () => "", coupled: () => t("drafts.coupled_text"), strict: () => t("drafts.strict_text"), rejection: () => t("drafts.rejection_text") };

// Returns the form's fields for the saved settings.
function savedFields({ choice, candidates }) {
  const who = choice.drafts === null && choice.methods === null ? "usual" : "chosen";
  const isNamed = (name, names) => names === null || names.includes(name);
  const isSaved = ({ id, method }) => (!id || isNamed(id, choice.drafts)) && isNamed(method, choice.methods);
  const ticked = candidates.filter(
    (candidate) => (who === "usual" || choice.drafts === null ? candidate.in_use : true) && isSaved(candidate),
  );
  return {
    who,
    chosen: Object.fromEntries(ticked.map((candidate) => [candidate.method, candidate.id])),
    length: choice.num_draft_tokens ? "fixed" : "governor",
    tokens: String(choice.num_draft_tokens ?? 4),
    policy: choice.policy ?? "",
    acceptance: choice.acceptance ?? "",
  };
}
// Returns the settings for the form's fields.
function choiceOf({ who, chosen, length, tokens, policy, acceptance }) {
  const isOwn = who === "chosen" && policy !== "off";
  const methods = Object.keys(chosen);
  return {
    drafts: isOwn ? Object.values(chosen).filter(Boolean) : null,
    methods: isOwn && methods.length ? methods : null,
    num_draft_tokens: length === "fixed" && policy !== "off" ? readNumber(tokens, LENGTHS) : null,
    policy: policy || null,
    acceptance: acceptance || null,
  };
}
function changesOf(values, before) {
  const isChanged = ([name, value]) => JSON.stringify(value) !== JSON.stringify(before[name]);
  return Object.fromEntries(Object.entries(values).filter(isChanged));
}

// Order: candidates of the latest benchmark, fastest first; those measured earlier; then the others, as ranked.
const orderOf = ({ measured }) => (measured ? (measured.is_latest ? 0 : 1) : 2);
function byMeasurement(left, right) {
  const order = orderOf(left) - orderOf(right);
  return order || (orderOf(left) === 0 ? right.measured.ratio - left.measured.ratio : 0);
}

component("drafts", () => ({
  view: null,
  problem: "",
  refusal: "",
  isBusy: false,
  who: "usual",
  chosen: {},
  length: "governor",
  tokens: "4",
  policy: "",
  acceptance: "",
  measuring: "",
  downloads: [],
  saved: {},
  opensRefused: false, // only a new view opens or closes the fold: a person may be reading in it

  init() {
    live("measuring", (measuring) => {
      const ended = this.measuring && !measuring.active;
      this.measuring = measuring.active?.model_id ?? "";
      if (ended) this.read();
    });
    const unitOf = ({ models }) => models.filter(({ id }) => id === data.model.id).map((unit) => [unit.state, unit.draft_ids, unit.methods]);
    liveChange("state", unitOf, () => this.read());
    live("drafting", (counts) => {
      if (this.view) this.view.counts = counts[data.model.id] ?? this.view.counts;
    });
    modelsChange(() => this.read());
    live("downloads", ({ downloads }) => (this.downloads = downloads));
    return this.read();
  },

  get isWaiting() {
    return !this.view && !this.problem;
  },
  get isNoMain() {
    return this.view && this.view.model.kind !== "main";
  },
  get isReady() {
    return Boolean(this.view) && !this.isNoMain;
  },
  get rows() {
    const picker = { view: this.view, chosen: this.chosen };
    return [...this.view.candidates].sort(byMeasurement).map((candidate) => candidateRow(candidate, picker));
  },
  get fitting() {
    return this.rows.filter((row) => !row.refusal);
  },
  get refused() {
    return this.rows.filter((row) => row.refusal);
  },
  get isMeasured() {
    return this.fitting.some((row) => row.measured);
  },
  get gain() {
    return gainRow(this.view.gain);
  },
  get canMeasure() {
    return !this.isMeasured && !this.isMeasuring && this.fitsAny;
  },
  // Whether there is a fitting drafter, apart from methods that draft from the text itself.
  get fitsAny() {
    return this.fitting.some((row) => row.origin !== "text");
  },
  get refusedWords() {
    return t.n("drafts.refused", this.refused.length);
  },
  get offers() {
    const coming = (offer) => this.downloads.find((download) => download.repository === offer.repository);
    return this.view.published.map((offer) => offerRow(offer, coming(offer)));
  },
  get isChoosing() {
    return this.who === "chosen";
  },
  get isFixed() {
    return this.length === "fixed";
  },
  get isMeasuring() {
    return Boolean(this.measuring);
  },
  get measuringWords() {
    return t("drafts.measuring", { model: this.measuring });
  },
  get elsewhereWords() {
    return this.view.elsewhere.length ? t("drafts.elsewhere", { names: this.view.elsewhere.join(", ") }) : "";
  },
  get chosenWords() {
    const names = this.rows.filter((row) => row.isChosen).map((row) => row.name);
    return this.who === "chosen" ? names.join(", ") || t("drafts.none_chosen") : "";
  },
  get policyWords() {
    return POLICIES[this.policy || this.view.usual.policy]();
  },
  get acceptanceWords() {
    return RULES[this.acceptance || this.view.usual.acceptance]();
  },
  get aloneWords() {
    const { footprint } = this.view.model;
    return footprint ? memoryWords(footprint) : t("core.none");
  },
  get extraWords() {
    const used = this.rows.filter((row) => (this.who === "chosen" ? row.isChosen : row.in_use));
    return bytes(used.reduce((sum, row) => sum + row.extra.total_bytes, 0));
  },
  get ceilingWords() {
    return this.view.ceiling_bytes ? bytes(this.view.ceiling_bytes) : t("core.none");
  },
  get paysAddress() {
    return paysAddress(data.model.id);
  },

  read: reader(
    () => api("GET", draftsCall(data.model.id)),
    function show(view) {
      this.take(view);
    },
  ),
  // Keeps fields that were changed here but not saved; the others take the values that were saved elsewhere meanwhile.
  take(view) {
    const saved = savedFields(view);
    const own = this.view ? changesOf(this.fields, this.saved) : {};
    Object.assign(this, saved, own, { saved, view, measuring: view.measuring });
    this.opensRefused = !this.fitsAny;
  },

  choose(candidate, event) {
    const { [candidate.method]: _, ...others } = this.chosen;
    this.chosen = event.target.checked ? { ...others, [candidate.method]: candidate.id } : others;
  },
  get fields() {
    const { who, chosen, length, tokens, policy, acceptance } = this;
    return { who, chosen, length, tokens, policy, acceptance };
  },
  // Sends only fields that were changed here: others may have been saved elsewhere since this page read them.
  async save() {
    this.refusal = "";
    if (this.who === "chosen" && !Object.keys(this.chosen).length && this.policy !== "off") {
      this.refusal = t("drafts.choose_one");
      return;
    }
    this.isBusy = true;
    const { fields } = this;
    try {
      const changes = changesOf(choiceOf(fields), choiceOf(this.saved));
      const { became } = await api("PUT", draftsCall(data.model.id), changes);
      toast(becameWords(became), "good");
      this.saved = fields;
      await this.read();
    } catch (error) {
      this.refusal = error.message;
    }
    this.isBusy = false;
  },
  measure() {
    return attempt(() => api("POST", MEASUREMENTS, { model: data.model.id }));
  },
  async attach(candidate) {
    this.isBusy = true;
    await attempt(async () => {
      const body = { model: data.model.id, draft: candidate.id };
      const { measuring } = await api("POST", "/admin/api/drafts/attach", body);
      const { name } = candidate;
      toast(measuring ? t("drafts.attached", { name }) : t("drafts.attached_only", { name }), "good");
      await this.read();
    });
    this.isBusy = false;
  },
  async download(offer) {
    const body = { repository: offer.repository, drafts_for: data.model.id };
    await attempt(() => api("POST", "/admin/api/downloads", body), t("drafts.is_coming", { name: offer.repository }));
  },
}));
