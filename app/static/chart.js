// Line charts by uPlot in the colours of the page: they follow its theme and its width. The page loads vendor/uplot.js.

const root = document.documentElement;
export const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

// Draws options(width) with uPlot into a node; answers a function that takes new data.
export function chart(node, options, data) {
  let plot = null;
  let values = data;
  const draw = () => {
    plot?.destroy();
    plot = new globalThis.uPlot(options(Math.max(node.clientWidth, 60)), values, node);
  };
  draw();
  new ResizeObserver(() => {
    if (plot.width !== node.clientWidth && node.clientWidth) plot.setSize({ width: node.clientWidth, height: plot.height });
  }).observe(node);
  new MutationObserver(draw).observe(root, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return (fresh) => {
    values = fresh;
    plot.setData(fresh);
  };
}

// An axis with quiet lines; `values` writes the numbers.
export const axis = (values, extra = {}) => ({
  stroke: colour("soft"),
  grid: { stroke: colour("line"), width: 1 },
  ticks: { show: false },
  font: "12px system-ui, sans-serif",
  values: (_, splits) => splits.map(values),
  ...extra,
});

export const area = (label, name, extra = {}) => ({
  label,
  stroke: colour(name),
  fill: `${colour(name)}22`,
  width: 2,
  points: { show: false },
  ...extra,
});
