// Requests in words: what the overview says of those that run and those that ended.

import { number, percent, seconds, t } from "./core.js";

const FINE = ["stop", "length", "tool_calls"];

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
      time: seconds(Math.max(0, Date.now() / 1000 - request.started_at)),
    }),
  share: (acceptance) => (acceptance === null ? t("core.none") : percent(acceptance)),
  accepted: (request) => t("overview.accepted", { share: percent(request.acceptance) }),
  outcomeWords: (request) =>
    ({
      stop: t("requests.stop"),
      length: t("requests.length"),
      tool_calls: t("requests.tool_calls"),
      cancelled: t("requests.was_cancelled"),
    })[request.outcome] ?? request.outcome,
  outcomeTone: (request) => (FINE.includes(request.outcome) ? "good" : request.outcome === "cancelled" ? "" : "bad"),
};

// Who asked: a key by its name, and these pages.
export const callerWords = (name) => (name === "dashboard" ? t("requests.dashboard") : name);
