// Words that the pages about models share: methods, states, caches and memory.

import { bytes, number, t } from "./core.js";

// Names of one method, or of several joined by "+"; also of `auto` and `off`. Unknown methods keep their id.
export const methodWords = (method) => method.split("+").map((name) => t.or(`method.${name}`, name)).join(" + ");

const POLICIES = {
  single: () => t("drafts.policy_single"),
  auto: () => t("drafts.policy_auto"),
  off: () => t("drafts.policy_off"),
};
export const policyWords = (policy) => POLICIES[policy]?.() ?? policy;

// When a choice for a model takes effect.
const BECAME = {
  loaded: () => t("drafts.felt_now"),
  in_use: () => t("drafts.felt_later"),
  not_loaded: () => t("drafts.felt_load"),
};
export const becameWords = (became) => BECAME[became]();

const STATES = {
  available: { tone: "", words: () => t("model.available") },
  loading: { tone: "busy", words: () => t("model.loading") },
  loaded: { tone: "good", words: () => t("model.loaded") },
  too_large: { tone: "bad", words: () => t("model.too_large") },
  unusable: { tone: "bad", words: () => t("model.unusable") },
};
export const stateOf = (state) => STATES[state] ?? { tone: "", words: () => state };

const FAMILIES = {
  trim: () => [t("cache.trim"), t("cache.trim_title")],
  slice: () => [t("cache.slice"), t("cache.slice_title")],
  snapshot: () => [t("cache.snapshot"), t("cache.snapshot_title")],
  alone: () => [t("cache.alone"), t("cache.alone_title")],
  apart: () => [t("cache.apart"), t("cache.apart_title")],
};
const familyWords = (families) => families.map((family) => FAMILIES[family]?.() ?? [family, ""]);
export const cacheWords = (families) => familyWords(families).map(([words]) => words).join(" + ") || t("core.none");
export const cacheTitle = (families) => familyWords(families).map(([, title]) => title).join(" ");

// The parts of the memory that a model needs, and their sum.
export const memoryWords = (footprint) =>
  t("memory.sum", {
    weights: bytes(footprint.weights_bytes),
    cache: bytes(footprint.cache_bytes),
    peak: bytes(footprint.peak_bytes),
    total: bytes(footprint.total_bytes),
  });
export const tooLargeWords = (footprint) =>
  t("memory.too_large", { sum: memoryWords(footprint), ceiling: bytes(footprint.ceiling_bytes) });

const PARAMETERS = [[1e9, "B"], [1e6, "M"], [1e3, "K"]];
export function parameterWords(count) {
  const [scale, letter] = PARAMETERS.find(([power]) => count >= power) ?? [1, ""];
  return count ? `${number(count / scale, count / scale < 10 ? 1 : 0)}${letter}` : "";
}
export const bitWords = (bits) => (bits ? t("model.bits", { bits }) : "");
export const contextWords = (tokens) => (tokens ? t.n("model.tokens", tokens) : t("core.none"));
export const times = (ratio) => t("model.times", { ratio: number(ratio, 2) });
export const aboutTimes = (ratio) => t("model.about_times", { ratio: number(ratio, 1) });

export const drafterWords = (drafts) => drafts.map((draft) => draft.id).join(", ") || t("overview.alone");
// Memory that a loaded model uses now, in bytes.
export const usedBytes = (loaded) => loaded.weights_bytes + loaded.cache_bytes + loaded.prefix_cache_bytes;

const FOLDER_PROBLEMS = {
  missing: (values) => t("models.folder_missing", values),
  forbidden: (values) => t("models.folder_forbidden", values),
};
export const folderWords = ({ folder, problem }) => FOLDER_PROBLEMS[problem]({ folder });

const path = (id) => id.split("/").map(encodeURIComponent).join("/");
export const modelAddress = (id) => `/admin/models/${path(id)}`;
export const draftsAddress = (id) => `/admin/drafts/${path(id)}`;
// The page that a model's name links to: the draft picker if the model can have drafters.
export const nameAddress = ({ id, kind }) => (kind === "main" ? draftsAddress(id) : modelAddress(id));
export const paysAddress = (id) => `/admin/pays/${path(id)}`;
export const draftsCall = (id) => `/admin/api/drafts/${path(id)}`;
export const filesCall = (id) => `/admin/api/files/${path(id)}`;
export const settingsCall = (id) => `/admin/api/models/${path(id)}/settings`;

// Returns the state of one model from the live topic `state`; null if the model is neither loaded nor loading.
export function liveStateOf(state, id) {
  const loading = state.loading.find((model) => model.id === id);
  if (loading) return { state: "loading", fraction: loading.fraction };
  const loaded = state.models.find((model) => model.id === id);
  if (!loaded) return null;
  return { state: loaded.state === "ready" ? "loaded" : loaded.state, fraction: 1, loaded };
}
