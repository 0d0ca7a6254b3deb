// Speed by draft length: a line with spread for each method; horizontal lines for no drafting (1.0×) and the governor.

import { chart } from "./chart.js";
import { number, t } from "./core.js";
import { methodWords, times } from "./model_words.js";

// Numbers of the series colours, the same as for the chat's marks.
const SERIES = { draft_model: 1, dflash: 2, ngram: 3, eagle3: 4, mtp: 5 };
const EDGE = 0.6;
const APART = 0.07;

// Round ratios from 0 up to `most`, at most seven.
function ratios(most) {
  const step = [0.25, 0.5, 1, 2, 5, 10, 20, 50].find((ratio) => most / ratio <= 6) ?? most / 2;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, count) => count * step);
}

// The axis of draft lengths is logarithmic; methods of the same length are offset, so that their spreads stay apart.
function shape(cell) {
  const drafting = cell.settings.filter((setting) => setting.num_draft_tokens);
  const lengths = [...new Set(drafting.map((setting) => setting.num_draft_tokens))].sort((low, high) => low - high);
  const methods = [...new Set(drafting.map((setting) => setting.method))];
  const ends = lengths.length ? [Math.log2(lengths[0]) - EDGE, Math.log2(lengths.at(-1)) + EDGE] : [0, 1];
  const find = (method) => cell.settings.find((setting) => setting.method === method);
  const across = (method) => (find(method) ? ends.map((place) => [place, find(method).tokens_per_second]) : []);
  const along = (method, at) => drafting
    .filter((setting) => setting.method === method)
    .map((setting) => [
      Math.log2(setting.num_draft_tokens) + APART * (at - (methods.length - 1) / 2),
      setting.tokens_per_second,
      setting.slowest,
      setting.fastest,
    ])
    .sort(([place], [other]) => place - other);
  const plain = find("off").tokens_per_second;
  const tops = cell.settings.map((setting) => (setting.num_draft_tokens ? setting.fastest : setting.tokens_per_second));
  const top = Math.max(1, ...tops) * 1.05;
  return {
    x: ends,
    top,
    xTicks: lengths.map((length) => [Math.log2(length), number(length)]),
    yTicks: ratios(top / plain).map((ratio) => [ratio * plain, number(ratio * plain, plain < 10 ? 1 : 0), times(ratio)]),
    xWords: t("pays.axis_lengths"),
    yWords: t("pays.axis_speed"),
    series: [
      { label: t("pays.baseline"), colour: "var(--ink)", dash: "8 5", points: across("off") },
      { label: t("method.auto"), colour: "var(--soft)", dash: "2 4", points: across("auto") },
      ...methods.map((method, at) => (
        { label: methodWords(method), colour: `var(--series-${SERIES[method] ?? 5})`, hasDots: true, points: along(method, at) }
      )),
    ].filter((line) => line.points.length),
  };
}

// Returns a function that draws a cell into the node.
export function plot(node) {
  const draw = chart(node, 300);
  return (cell) => draw(shape(cell));
}
