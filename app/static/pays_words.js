// What a measurement says, in words: its recommendation, its settings, its circumstances.

import { ago, moment, number, percent, seconds, t } from "./core.js";
import { methodWords, times } from "./model_words.js";

const PAYS = 1.05;

// Measurements of an earlier version tell the plain ratio only.
const gainOf = (setting) => setting.gain ?? setting.to_plain;

const better = (first, each) => (!first || gainOf(each) > gainOf(first) ? each : first);
const best = (cell) => cell.settings.filter((each) => each.method !== "off").reduce(better, null);
const pays = (setting) => setting !== null && gainOf(setting) >= PAYS;
const alone = (results) => results.cells.find((cell) => cell.rows === 1);

export function answerOf(results) {
  const cell = alone(results);
  const found = cell && best(cell);
  if (!found) return t("pays.nothing");
  if (!pays(found)) return batchPays(results) ? t("pays.plain_wins_alone") : t("pays.plain_wins");
  const gain = times(gainOf(found));
  if (found.method === "auto") return found.used ? t("pays.governor_wins", { gain, method: methodWords(found.used) }) : t("pays.governor_wins_bare", { gain });
  return t.n("pays.method_wins", found.num_draft_tokens, { gain, method: methodWords(found.method) });
}

const batch = (results) => results.cells.find((each) => each.rows > 1 && each.context === alone(results)?.context);
const batchPays = (results) => Boolean(batch(results)) && pays(best(batch(results)));

export function batchOf(results) {
  const cell = batch(results);
  const found = cell && best(cell);
  if (!found) return "";
  const told = { count: number(cell.rows), gain: times(gainOf(found)) };
  return pays(found) ? t("pays.batch_wins", told) : t("pays.batch_plain", told);
}

export function settingRow(each, top) {
  const name = methodWords(each.method);
  const words = each.num_draft_tokens ? t.n("pays.with_drafts", each.num_draft_tokens, { method: name }) : name;
  const used = each.method === "auto" && each.used ? t("pays.mostly", { method: methodWords(each.used) }) : "";
  return {
    ...each,
    words: [words, used].filter(Boolean).join(" "),
    frame: each === top ? "best" : "",
    speedWords: number(each.tokens_per_second, each.tokens_per_second < 100 ? 1 : 0),
    ratioWords: each.method === "off" ? t("core.none") : times(each.to_plain),
    acceptedWords: each.acceptance === null ? t("core.none") : percent(each.acceptance),
    cycleWords: each.tokens_per_cycle === null ? t("core.none") : number(each.tokens_per_cycle, 2),
    pickWords: t("pays.pick_named", { setting: words }),
  };
}
export const fastest = (cell) => cell.settings.reduce(better, null);

// Plain decoding, the governor, and the best length of each method.
export function telling(cell) {
  const tops = new Map();
  for (const each of cell.settings) tops.set(each.method, better(tops.get(each.method), each));
  return cell.settings.filter((each) => tops.get(each.method) === each);
}
export const cellWords = (cell) => t.n(cell.context > 128 ? "pays.rows_long" : "pays.rows_count", cell.rows, { tokens: number(cell.context) });

export function historyRow(row, opened) {
  const cell = alone(row.results);
  const found = cell && best(cell);
  const { options, drafts } = row.results;
  const when = moment(row.created_at);
  return {
    ...row,
    isOpen: row.id === opened,
    gainWords: found ? times(gainOf(found)) : t("core.none"),
    momentWords: ago(row.created_at),
    aboutWords: [options.device || row.machine.processor, drafts.join(" + "), t("pays.version", { version: row.versions.paceline ?? "" })].filter(Boolean).join(" · "),
    removeWords: t("pays.remove_named", { moment: when }),
  };
}

// What a reader must know to trust the numbers.
export function notesOf(row) {
  const { options, skipped, interrupted } = row.results;
  const notes = [
    interrupted ? t("pays.interrupted") : "",
    skipped.length ? t("pays.skipped") : "",
    options.disturbed ? t.n("pays.disturbed", options.disturbed) : "",
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
export const disturbedNow = (count) => (count ? t.n("pays.disturbed", count) : "");
