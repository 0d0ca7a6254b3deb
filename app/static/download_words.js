// Words for downloads and repositories: states, problems, facts; shared by queue and search.

import { ago, bytes, seconds, t } from "./core.js";
import { methodWords, modelAddress } from "./model_words.js";

const SILENT_SECONDS = 10;
const PROBLEMS = {
  offline: (values) => t("downloads.problem_offline", values),
  proxy: (values) => t("downloads.problem_proxy", values),
  busy: (values) => t("downloads.problem_busy", values),
  hub_error: (values) => t("downloads.problem_hub_error", values),
  gated: (values) => t("downloads.problem_gated", values),
  not_found: (values) => t("downloads.problem_not_found", values),
  refused: (values) => t("downloads.problem_refused", values),
  empty: (values) => t("downloads.problem_empty", values),
  unsafe: (values) => t("downloads.problem_unsafe", values),
  wrong_hash: (values) => t("downloads.problem_wrong_hash", values),
  disk_full: (values) => t("downloads.problem_disk_full", values),
  unwritable: (values) => t("downloads.problem_unwritable", values),
  folder_missing: () => t("downloads.problem_folder_missing"),
  folder_taken: (values) => t("downloads.problem_folder_taken", values),
  in_use: (values) => t("downloads.problem_in_use", values),
  stalled: (values) => t("downloads.problem_stalled", values),
  interrupted: (values) => t("downloads.problem_interrupted", values),
};

export const problemWords = (code, repository, text) => PROBLEMS[code]?.({ repository }) ?? text;
const STATES = {
  queued: { tone: "", words: () => t("downloads.state_queued") },
  running: { tone: "busy", words: () => t("downloads.state_running") },
  connecting: { tone: "busy", words: () => t("downloads.state_connecting") },
  waiting: { tone: "busy", words: () => t("downloads.state_waiting") },
  verifying: { tone: "busy", words: () => t("downloads.state_verifying") },
  paused: { tone: "", words: () => t("downloads.state_paused") },
  done: { tone: "good", words: () => t("downloads.state_done") },
  failed: { tone: "bad", words: () => t("downloads.state_failed") },
  cancelled: { tone: "", words: () => t("downloads.state_cancelled") },
};

export const sizeWords = (count) => (count ? bytes(count) : t("downloads.size_unknown"));

// Returns the row of a download.
export function downloadRow(download) {
  const { repository, state, done_bytes: done, total_bytes: total } = download;
  const shownState = STATES[state === "running" && STATES[download.phase] ? download.phase : state];
  const isActive = ["queued", "running", "paused"].includes(state);
  return {
    ...download,
    tone: shownState.tone,
    stateWords: shownState.words(),
    share: total ? done / total : 0,
    hasBar: isActive && total > 0,
    amountWords: amountWords(state, done, total),
    paceWords: paceWords(download),
    isSilent: download.silent_seconds >= SILENT_SECONDS,
    silentWords: silentWords(download),
    problemWords: download.problem ? problemWords(download.problem, repository, download.problem_text) : "",
    draftsForWords: download.drafts_for ? t("downloads.drafts_for", { model: download.drafts_for }) : "",
    get whenWords() {
      return state === "done" || state === "failed" ? ago(download.changed_at) : "";
    },
    address: modelAddress(repository),
    barWords: t("downloads.bar", { repository }),
    canPause: state === "queued" || state === "running",
    canResume: state === "paused",
    canRetry: state === "failed" || state === "cancelled",
    canCancel: isActive,
    canMove: state === "queued",
    isDone: state === "done",
    isFinished: !isActive,
    named: { repository },
  };
}

function amountWords(state, done, total) {
  if (state === "done") return sizeWords(total);
  return total ? t("downloads.amount", { done: bytes(done), total: bytes(total) }) : "";
}

function paceWords({ state, phase, bytes_per_second: rate, seconds_left: left }) {
  if (state !== "running" || phase !== "downloading" || !rate) return "";
  const pace = t("downloads.rate", { amount: bytes(rate) });
  return left === null ? pace : `${pace} · ${t("downloads.left", { time: seconds(Math.max(1, left)) })}`;
}

function silentWords({ silent_seconds: silence, reconnect_seconds: left }) {
  return t("downloads.silent", { silence: seconds(silence), time: seconds(Math.max(1, left)) });
}

// Returns the row of a repository that a search found.
export const foundRow = (result) => ({
  ...result,
  methodWords: result.method ? t("downloads.drafter", { method: methodWords(result.method) }) : "",
  factWords: [
    t.n("downloads.count_downloads", result.downloads),
    t.n("downloads.count_likes", result.likes),
    result.modified_at ? t("downloads.updated", { ago: ago(result.modified_at) }) : "",
    result.licence ? t("downloads.licence", { licence: result.licence }) : "",
    ...result.tags,
  ].filter(Boolean).join(" · "),
  lookWords: t("downloads.look_named", { repository: result.repository }),
  details: null,
  problem: "",
  isLooking: false,
});

// Returns the facts below a repository's row: the disk space and memory that it needs.
export function detailFacts(details) {
  const missing = details.total_bytes - details.free_bytes;
  return {
    ...details,
    sizeWords: bytes(details.total_bytes),
    fileWords: t.n("downloads.files", details.files.length),
    roomWords: missing > 0
      ? t("downloads.no_room", { amount: bytes(missing) })
      : t("downloads.room", { amount: bytes(details.free_bytes - details.total_bytes) }),
    hasRoom: missing <= 0,
    memoryWords: memoryWords(details),
    loadableWords: details.loadable ? "" : t("downloads.not_loadable", { type: details.model_type }),
    getWords: t("downloads.get_size", { size: bytes(details.total_bytes) }),
  };
}

function memoryWords({ fits_memory: fits, weights_bytes: weights, memory_ceiling_bytes: ceiling }) {
  if (fits === null) return t("downloads.memory_unknown", { amount: bytes(weights) });
  const values = { amount: bytes(weights), ceiling: bytes(ceiling) };
  return fits ? t("downloads.memory_fits", values) : t("downloads.memory_large", values);
}
