// One request: time by phase, acceptance by position and by method, and the reasons. Live while it runs.

import { api, attempt, component, confirm, data, live, number, percent, seconds, t } from "./core.js";
import { methodWords } from "./model_words.js";
import { callerWords, requestWords } from "./running.js";

const PHASES = {
  queue: () => t("requests.phase_queue"),
  load: () => t("requests.phase_load"),
  prefill: () => t("requests.phase_prefill"),
  decode: () => t("requests.phase_decode"),
  other: () => t("requests.phase_other"),
};
const PARTS = {
  draft: () => t("requests.part_draft"),
  verify: () => t("requests.part_verify"),
  rewind: () => t("requests.part_rewind"),
  other: () => t("requests.part_host"),
};

const SAMPLING = ["seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];

// Pieces of a bar, ordered as `words`, in proportion to their seconds; flex-grow fills the bar if its sum reaches 1.
function pieces(words, lengths) {
  const total = Object.values(lengths).reduce((sum, length) => sum + length, 0);
  const names = Object.keys(words).filter((name) => lengths[name] > 0);
  return names.map((name) => ({
    name,
    seconds: lengths[name],
    words: words[name](),
    tone: `part-${name}`,
    style: { "flex-grow": String((100 * lengths[name]) / total) },
  }));
}

const DECISIONS = {
  draft: (values) => t("requests.decided_draft", values),
  probe: (values) => t("requests.decided_probe", values),
  plain: (values) => t("reason.plain", values),
  measuring: () => t("reason.measuring"),
};

component("request", () => ({
  ...requestWords,
  request: data.request,

  init() {
    live("requests", (now) => this.refresh(now.recent.find((request) => request.id === this.request.id)));
  },

  get runs() {
    return this.request.phase !== "done";
  },
  get figures() {
    return this.request.figures;
  },
  get tone() {
    return this.runs ? this.phaseTone(this.request) : this.outcomeTone(this.request);
  },
  get stateWords() {
    return this.runs ? this.phase(this.request) : this.outcomeWords(this.request);
  },
  get firstToken() {
    const ms = this.figures.timings.first_token_ms;
    return ms ? seconds(ms / 1000) : t("core.none");
  },

  get phases() {
    const { total, ...known } = this.figures.seconds;
    const rest = total - Object.values(known).reduce((sum, length) => sum + length, 0);
    return pieces(PHASES, { ...known, other: rest > total / 100 ? rest : 0 });
  },
  get parts() {
    const { draft_ms: draft, verify_ms: verify, rewind_ms: rewind, host_ms: host } = this.figures.timings;
    if (!draft && !verify) return [];
    return pieces(PARTS, { draft: draft / 1000, verify: verify / 1000, rewind: rewind / 1000, other: host / 1000 });
  },
  wordsOf: (list) => list.map((part) => `${part.words}: ${seconds(part.seconds)}`).join(", "),

  get positions() {
    const { accepted_per_position: counts, cycles } = this.figures.speculation;
    return counts.map((count, index) => {
      const share = cycles ? count / cycles : 0;
      return { place: index, share, words: t("requests.position", { place: number(index + 1) }), percent: percent(share) };
    });
  },
  get methods() {
    return Object.entries(this.figures.speculation.methods).map(([name, counts]) => ({
      ...counts,
      name,
      words: methodWords(name),
      kept: counts.drafted
        ? `${number(counts.accepted)} (${percent(counts.accepted / counts.drafted)})`
        : t("core.none"),
      per_cycle: counts.cycles ? 1 + counts.accepted / counts.cycles : 0,
    }));
  },

  // Whether the request ended before its first token, so that there is nothing to say about drafts.
  get hasNothing() {
    return !this.runs && !this.request.completion_tokens;
  },
  get decision() {
    const { decision, method } = this.figures.speculation;
    const tell = decision && DECISIONS[decision.kind];
    if (!tell && method === "off") return this.runs || this.hasNothing || this.reason ? "" : t("requests.plain");
    if (!tell) return this.figures.asked.num_draft_tokens ? t("requests.by_method", { method: methodWords(method) }) : "";
    return tell({
      method: methodWords(decision.method),
      count: number(decision.num_draft_tokens),
      ratio: number(decision.cost_ratio, 2),
      share: percent(decision.acceptance),
    });
  },

  // Empty if `decision` already gives this reason, because it is the governor's last decision.
  get reason() {
    const { decision } = this.figures.speculation;
    return DECISIONS[decision?.kind] && decision.kind === this.request.reason_code ? "" : this.reasonWords(this.request);
  },

  get facts() {
    const { asked } = this.figures;
    const unlimited = t("requests.unlimited");
    const facts = [
      [t("requests.endpoint"), this.request.endpoint],
      [t("requests.key"), callerWords(this.request.key) || t("requests.no_key")],
      [t("requests.streamed"), asked.streamed ? t("requests.yes") : t("requests.no")],
      [t("requests.choices"), number(asked.choices)],
      [t("requests.max_tokens"), asked.max_tokens === null ? unlimited : number(asked.max_tokens)],
      [t("requests.wanted"), [methodWords(asked.method), asked.num_draft_tokens && number(asked.num_draft_tokens)].filter(Boolean).join(" · ")],
      [t("requests.drafters"), asked.drafters.join(", ") || t("core.none")],
    ];
    const sampling = SAMPLING.filter((name) => name in asked.sampling).map((name) => [name, String(asked.sampling[name])]);
    return [...facts, ...sampling].map(([name, value]) => ({ name, value }));
  },

  // The figures of a cancelled request arrive a moment after its end.
  async refresh(ended) {
    if (!this.runs && (!ended || ended.completion_tokens + ended.drafted === this.request.completion_tokens + this.request.drafted)) return;
    const path = `/admin/api/requests/${encodeURIComponent(this.request.id)}`;
    this.request = (await api("GET", path).catch(() => null))?.request ?? this.request;
  },

  async cancel() {
    const wording = { title: t("requests.cancel_title"), text: t("requests.cancel_text"), action: t("requests.cancel_yes") };
    if (!(await confirm({ ...wording, tone: "bad" }))) return;
    const path = `/admin/api/requests/${encodeURIComponent(this.request.id)}/cancel`;
    await attempt(() => api("POST", path), t("requests.cancelled"));
  },
}));
