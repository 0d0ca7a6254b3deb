// Words for running and ended requests, shared by the overview and the pages about requests.

import { number, percent, seconds, t } from "./core.js";
import { methodWords } from "./model_words.js";
import { reasonWords } from "./reason_words.js";

const FINE = ["stop", "length", "tool_calls"];
export const isFine = (request) => FINE.includes(request.outcome);
const OUTCOMES = {
  stop: () => t("requests.stop"),
  length: () => t("requests.length"),
  tool_calls: () => t("requests.tool_calls"),
  cancelled: () => t("requests.was_cancelled"),
  worker_restarted: () => t("requests.worker_restarted"),
  stopping: () => t("requests.stopping"),
  shutting_down: () => t("requests.stopping"),
  model_unavailable: () => t("requests.model_unavailable"),
  model_quarantined: () => t("requests.model_quarantined"),
  insufficient_memory: () => t("requests.insufficient_memory"),
  queue_full: () => t("requests.queue_full"),
  client_too_slow: () => t("requests.client_too_slow"),
  context_length_exceeded: () => t("requests.too_long"),
  invalid_request: () => t("requests.invalid"),
};

export const requestWords = {
  address: (request) => `/admin/requests/${encodeURIComponent(request.id)}`,
  phase: (request) =>
    ({
      queued: t("overview.queued"),
      loading: t("overview.load"),
      prefill: t("overview.prefill"),
      decode: t("overview.decode"),
    })[request.phase],
  phaseTone: (request) => (request.phase === "decode" ? "good" : "busy"),
  counts: (request) =>
    t("overview.counts", {
      prompt: number(request.prompt_tokens),
      tokens: number(request.completion_tokens),
      speed: number(request.tokens_per_second, 1),
      time: seconds(request.seconds),
    }),
  speedOf: (request) => (request.tokens_per_second ? number(request.tokens_per_second, 1) : t("core.none")),
  share: (acceptance) => (acceptance === null ? t("core.none") : percent(acceptance)),
  accepted: (request) => t("overview.accepted", { share: percent(request.acceptance) }),
  outcomeWords: (request) => (OUTCOMES[request.outcome] ?? (() => t("requests.failed")))(),
  reasonWords,
  methodWords: (request) => methodWords(request.method),
  outcomeTone: (request) => (isFine(request) ? "good" : request.outcome === "cancelled" ? "" : "bad"),
};

// Words for the caller of a request: the name of its API key, or the dashboard.
const CALLERS = { dashboard: () => t("requests.dashboard"), PACELINE_API_KEY: () => t("settings.api_key") };
export const callerWords = (name) => CALLERS[name]?.() ?? name;
