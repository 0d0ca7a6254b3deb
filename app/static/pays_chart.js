// Speed by draft length: a line for each method, plain decoding and the governor straight across.

import { area, axis, chart, colour } from "./chart.js";
import { number, t } from "./core.js";
import { methodWords } from "./model_words.js";

const COLOURS = ["series-1", "series-2", "series-3", "series-4", "series-5"];

// The lengths that were measured, one place each, and half a place of room at both ends for the straight lines.
function columns(cell) {
  const drafting = cell.settings.filter((each) => each.num_draft_tokens);
  const lengths = [...new Set(drafting.map((each) => each.num_draft_tokens))].sort((one, other) => one - other);
  const places = [-0.5, ...lengths.map((_, place) => place), Math.max(lengths.length, 1) - 0.5];
  const methods = [...new Set(drafting.map((each) => each.method))];
  const across = (method) => {
    const found = cell.settings.find((each) => each.method === method);
    return places.map(() => found?.tokens_per_second ?? null);
  };
  const along = (method) => [
    null,
    ...lengths.map((length) => drafting.find((each) => each.method === method && each.num_draft_tokens === length)?.tokens_per_second ?? null),
    null,
  ];
  return { lengths, methods, values: [places, across("off"), across("auto"), ...methods.map(along)] };
}

const line = (label, name, extra) => area(label, name, { fill: undefined, ...extra });

const options = ({ lengths, methods }) => (width) => ({
  width,
  height: 280,
  padding: [12, 16, 0, 0],
  legend: { live: false },
  cursor: { points: { show: false }, x: false, y: false, drag: { x: false, y: false } },
  scales: { x: { time: false, range: [-0.5, Math.max(lengths.length, 1) - 0.5] }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
  axes: [
    axis((place) => (Number.isInteger(place) ? String(lengths[place] ?? "") : ""), { grid: { show: false }, splits: () => lengths.map((_, place) => place), label: t("pays.axis_lengths"), labelSize: 22, size: 30, labelFont: "12px system-ui, sans-serif" }),
    axis((value) => number(value), { size: 54, label: t("pays.axis_speed"), labelSize: 20, labelFont: "12px system-ui, sans-serif" }),
  ],
  series: [
    { label: t("pays.axis_lengths") },
    line(t("method.off"), "ink", { dash: [8, 5], width: 1.5 }),
    line(t("method.auto"), "soft", { dash: [2, 4] }),
    ...methods.map((method, at) => {
      const name = COLOURS[at % COLOURS.length];
      return line(methodWords(method), name, { points: { show: true, size: 8, fill: colour(name) }, spanGaps: true });
    }),
  ],
});

// Draws cells into a node; answers a function that draws another one.
export function plot(node) {
  let shape = "";
  let fresh = null;
  return (cell) => {
    const found = columns(cell);
    const now = JSON.stringify([found.lengths, found.methods]);
    if (now !== shape) {
      shape = now;
      node.replaceChildren();
      fresh = chart(node, options(found), found.values);
    } else fresh(found.values);
  };
}
