// Speed by draft length: a line for each method, plain decoding and the governor straight across.

import { chart } from "./chart.js";
import { number, t } from "./core.js";
import { methodWords } from "./model_words.js";

const COLOURS = ["var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)", "var(--series-5)"];

// The lengths that were measured, one place each, and half a place of room at both ends for the straight lines.
function shape(cell) {
  const drafting = cell.settings.filter((each) => each.num_draft_tokens);
  const lengths = [...new Set(drafting.map((each) => each.num_draft_tokens))].sort((one, other) => one - other);
  const x = [-0.5, Math.max(lengths.length, 1) - 0.5];
  const across = (method) => {
    const found = cell.settings.find((each) => each.method === method);
    return found ? x.map((place) => [place, found.tokens_per_second]) : [];
  };
  const along = (method) => drafting
    .filter((each) => each.method === method)
    .map((each) => [lengths.indexOf(each.num_draft_tokens), each.tokens_per_second])
    .sort(([one], [other]) => one - other);
  const methods = [...new Set(drafting.map((each) => each.method))];
  const top = Math.max(1, ...cell.settings.map((each) => each.tokens_per_second)) * 1.1;
  return {
    x,
    top,
    xTicks: lengths.map((length, place) => [place, number(length)]),
    yTicks: [0, top / 2, top].map((speed) => [speed, number(speed)]),
    xWords: t("pays.axis_lengths"),
    yWords: t("pays.axis_speed"),
    series: [
      { label: t("method.off"), colour: "var(--ink)", dash: "8 5", points: across("off") },
      { label: t("method.auto"), colour: "var(--soft)", dash: "2 4", points: across("auto") },
      ...methods.map((method, at) => (
        { label: methodWords(method), colour: COLOURS[at % COLOURS.length], hasDots: true, points: along(method) }
      )),
    ].filter((each) => each.points.length),
  };
}

// Draws cells into a node; answers a function that draws another one.
export function plot(node) {
  const draw = chart(node, 280);
  return (cell) => draw(shape(cell));
}
