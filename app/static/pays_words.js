// Words for a measurement: verdicts, settings, changes, circumstances. The figures are in the report.

import { ago, moment, number, percent, seconds, t } from "./core.js";
import { aboutTimes, methodWords, policyWords, times } from "./model_words.js";

export const MEASUREMENTS = "/admin/api/measurements";
const share = (part) => percent(part);

export function settingWords({ method, num_draft_tokens: length }) {
  return length ? t("pays.with_length", { method: methodWords(method), length: number(length) }) : methodWords(method);
}

export const isAlone = (cell) => cell.rows === 1 && cell.context <= 128;
const bestOf = (cell) => cell.settings.find((setting) => setting.name === cell.best);
// The ratio of a single round is too imprecise for a second decimal.
const gainOf = (cell) => (cell.rounds > 1 ? times : aboutTimes)(bestOf(cell).ratio);

// The verdict of one cell as a sentence.
export function verdictWords(cell) {
  const words = comparedWords(cell);
  return cell.rounds === 1 && cell.verdict !== "none" ? t("pays.first_impression", { verdict: words }) : words;
}
function comparedWords(cell) {
  if (cell.verdict === "tie") return t("pays.tie", { share: share(cell.noise) });
  if (cell.verdict === "plain") return t("pays.plain_wins");
  if (cell.verdict === "none") return t("pays.nothing");
  const best = bestOf(cell);
  const values = { setting: settingWords(best), method: methodWords(best.used[0] ?? ""), gain: gainOf(cell) };
  return best.method === "auto" && best.used.length ? t("pays.governor_wins", values) : t("pays.method_wins", values);
}

export function answerOf(report) {
  const cell = report.cells.find(isAlone);
  return cell ? verdictWords(cell) : t("pays.nothing");
}
export function batchOf(report) {
  const cell = report.cells.find((batch) => batch.rows > 1 && batch.context <= 128);
  return cell && cell.verdict !== "none" ? t("pays.batch", { count: number(cell.rows), verdict: verdictWords(cell) }) : "";
}

// A sentence for a measurement that recommends no change; empty if it recommends changes or has no verdict.
export function adviceWords({ choice, advice, cells }) {
  if (!advice || advice.changes.length || !cells.some((cell) => cell.verdict !== "none")) return "";
  if (choice === null) return t("pays.keep");
  const kept = cells.flatMap((cell) => cell.settings).find((setting) => setting.name === advice.kept);
  return kept ? t("pays.kept", { setting: settingWords(kept) }) : t("pays.in_use_already");
}

const DOUBTS = {
  one_round: () => t("pays.one_round"),
  unsteady: (amount) => t("pays.unsteady", { share: share(amount) }),
  disturbed: (amount) => t.n("pays.disturbed", amount),
};
export const doubtsOf = (report) => report.doubts.map((doubt) => DOUBTS[doubt.kind](doubt.amount));

const listed = (values) => values.join(", ") || t("pays.value_none");
const VALUES = {
  drafts: { name: () => t("model_settings.drafts"), unset: () => t("drafts.who_usual"), words: listed },
  methods: { name: () => t("model_settings.methods"), unset: () => t("pays.value_all"), words: (values) => listed(values.map(methodWords)) },
  num_draft_tokens: { name: () => t("model_settings.num_draft_tokens"), unset: () => t("drafts.length_governor"), words: (value) => number(value) },
  policy: { name: () => t("model_settings.policy"), unset: () => t("drafts.as_server"), words: policyWords },
  prompt_lookup_min: { name: () => t("model_settings.prompt_lookup_min"), unset: () => t("drafts.as_server"), words: (value) => number(value) },
  prompt_lookup_max: { name: () => t("model_settings.prompt_lookup_max"), unset: () => t("drafts.as_server"), words: (value) => number(value) },
};
export function changeRow({ name, old, new: fresh }) {
  const { name: title, unset, words } = VALUES[name];
  const value = (raw) => (raw === null ? unset() : words(raw));
  return { name, title: title(), words: t("pays.change", { old: value(old), new: value(fresh) }) };
}
export const changeLines = (changes) =>
  changes.map((change) => changeRow(change)).map((row) => `${row.title}: ${row.words}`).join("\n");

// A range in words; empty if both ends read the same, as after a single round.
export const range = (low, high, write) => (write(low) === write(high) ? "" : t("pays.range", { low: write(low), high: write(high) }));
const speed = (value) => number(value, value < 100 ? 1 : 0);

export function settingRow(setting, cell) {
  const words = settingWords(setting);
  const isMixed = setting.method === "auto" && setting.used.length;
  const isPlain = setting.method === "off";
  return {
    ...setting,
    words: isMixed ? t("pays.mostly", { setting: words, method: methodWords(setting.used[0]) }) : words,
    frame: setting.name === cell.best ? "best" : "",
    isInUse: setting.changes?.length === 0,
    speedWords: speed(setting.tokens_per_second),
    speedRange: range(setting.slowest, setting.fastest, speed),
    ratioWords: isPlain ? t("core.none") : times(setting.ratio),
    ratioRange: isPlain ? "" : range(setting.low, setting.high, (value) => number(value, 2)),
    acceptedWords: setting.acceptance === null ? t("core.none") : percent(setting.acceptance),
    cycleWords: setting.tokens_per_cycle === null ? t("core.none") : number(setting.tokens_per_cycle, 2),
    pickWords: t("pays.pick_named", { setting: words }),
  };
}

// The fastest setting of each method (of drafting off and the governor, too), the cell's best, and the one in use.
export function telling(cell) {
  const tops = new Map();
  for (const setting of cell.settings) {
    if (!(tops.get(setting.method)?.ratio > setting.ratio)) tops.set(setting.method, setting);
  }
  return cell.settings.filter(
    (setting) => tops.get(setting.method) === setting || setting.name === cell.best || setting.changes?.length === 0,
  );
}
export const cellWords = (cell) => t.n(cell.context > 128 ? "pays.rows_long" : "pays.rows_count", cell.rows, { tokens: number(cell.context) });

export function shortVerdict(cell) {
  if (!cell || cell.verdict === "none") return t("core.none");
  if (cell.verdict === "tie") return t("pays.tie_short", { share: share(cell.noise) });
  return cell.verdict === "plain" ? methodWords("off") : gainOf(cell);
}
// Words for a model's latest measurement, on every page: its verdict with spread and age; the method if drafting pays.
export function gainRow(gain) {
  if (!gain) return null;
  const best = bestOf(gain);
  const method = best && gain.verdict === "faster" ? methodWords(best.used[0] ?? best.method) : "";
  const spread = best && gain.rounds > 1 ? range(best.low, best.high, (value) => number(value, 2)) : "";
  return {
    tone: gain.verdict === "faster" ? "good" : "",
    method,
    short: gain.verdict === "tie" ? t("drafts.no_difference") : shortVerdict(gain),
    words: verdictWords(gain),
    about: [spread, ago(gain.measured_at)].filter(Boolean).join(" · "),
  };
}

export function historyRow(row, opened) {
  const { options = {}, drafts = [] } = row.results;
  const when = moment(row.created_at);
  return {
    ...row,
    isOpen: row.id === opened,
    gainWords: shortVerdict(row.report.cells.find(isAlone)),
    momentWords: ago(row.created_at),
    aboutWords: [options.device || row.machine.processor, drafts.join(" + "), t("pays.version", { version: row.versions.paceline ?? "" })].filter(Boolean).join(" · "),
    removeWords: t("pays.remove_named", { moment: when }),
  };
}

// Circumstances that a reader needs to judge the numbers.
export function notesOf(row, cell) {
  const { options = {}, skipped = [], interrupted } = row.results;
  const rounds = cell ? Math.min(...cell.settings.map((setting) => setting.rounds)) : 0;
  const notes = [
    rounds > 1 ? t.n("pays.paired", rounds) : "",
    interrupted ? t("pays.interrupted") : "",
    skipped.length ? t("pays.skipped") : "",
    Array.isArray(options.prompts) ? t("pays.own_prompt") : t("pays.built_in"),
    row.versions["mlx-lm"] ? t("pays.engine", { mlx: row.versions.mlx, lm: row.versions["mlx-lm"] }) : "",
    ...(options.left_out ?? []),
  ];
  return notes.filter(Boolean).join(" ");
}

const PHASES = {
  loading: () => t("pays.loading"),
  measuring: () => t("pays.measuring"),
  paused: () => t("pays.paused"),
  restoring: () => t("pays.restoring"),
};
export const phaseWords = (phase) => PHASES[phase]?.() ?? "";
export const leftWords = (left) => t("pays.left", { time: seconds(Math.max(left, 1)) });
export const disturbedNow = (count) => (count ? t.n("pays.disturbed_now", count) : "");
