// Line charts as SVG in the colours of the page: they follow its theme and its width.

const LEFT = 46;
const RIGHT = 24;
const RIGHT_WORDS = 60; // "20.00 倍"
const LINE = 22;

function make(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

// A chart is {x: [low, high], top, xTicks: [[x, words]], yTicks: [[y, words, rightWords?]], series, xWords?, yWords?}.
// A series is {points: [[x, y, low?, high?]], colour, label?, dash?, isArea?, hasDots?}. Returns a function that draws
// a chart into `node`. Without `height`, the chart is as high as the node, so that height must not depend on the chart.
export function chart(node, height = 0) {
  let shown = null;
  let size = [];
  const measure = () => [Math.max(node.clientWidth, 120), height || Math.max(node.clientHeight, 120)];
  const draw = () => shown && node.replaceChildren(drawn(shown, ...size), ...legend(shown.series));
  new ResizeObserver(() => {
    if (String(size) === String(measure())) return;
    size = measure();
    draw();
  }).observe(node);
  size = measure();
  return (fresh) => {
    shown = fresh;
    draw();
  };
}

function drawn({ x: [low, high], top, xTicks, yTicks, series, xWords = "", yWords = "" }, width, height) {
  const bottom = height - (xWords ? 2 : 1) * LINE - 4;
  const right = width - (yTicks.some(([, , words]) => words) ? RIGHT_WORDS : RIGHT);
  const across = (x) => LEFT + ((x - low) / (high - low)) * (right - LEFT);
  const up = (y) => bottom - (y / top) * (bottom - (yWords ? LINE : 12));
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  svg.append(make("text", { x: 0, y: 11 }, yWords));
  svg.append(make("text", { x: (LEFT + right) / 2, y: height - 6, "text-anchor": "middle" }, xWords));
  for (const [y, words, other = ""] of yTicks) {
    svg.append(make("line", { x1: LEFT, x2: right, y1: up(y), y2: up(y), stroke: "var(--line)" }));
    svg.append(make("text", { x: LEFT - 8, y: up(y) + 4, "text-anchor": "end" }, words));
    svg.append(make("text", { x: right + 8, y: up(y) + 4 }, other));
  }
  for (const [x, words] of xTicks) svg.append(make("text", { x: across(x), y: bottom + 18, "text-anchor": "middle" }, words));
  for (const line of series) {
    const places = line.points.map(([x, y]) => [across(x).toFixed(1), up(y).toFixed(1)]);
    if (!places.length) continue;
    const path = `M${places.join("L")}`;
    const [[start], [end]] = [places[0], places.at(-1)];
    if (line.isArea) svg.append(make("path", { d: `${path}L${end},${bottom}L${start},${bottom}Z`, fill: line.colour, opacity: 0.13 }));
    svg.append(stroke("path", line, { d: path }));
    for (const [x, , slowest, fastest] of line.points) {
      if (fastest > slowest) svg.append(stroke("path", { ...line, dash: "none" }, { "stroke-width": 1, d: bar(across(x), up(slowest), up(fastest)) }));
    }
    if (line.hasDots) svg.append(...places.map(([cx, cy]) => make("circle", { cx, cy, r: 4, fill: line.colour })));
  }
  return svg;
}

const bar = (x, low, high) => `M${x},${low}V${high}M${x - 4},${low}H${x + 4}M${x - 4},${high}H${x + 4}`;

const stroke = (name, { colour, dash = "none" }, more) =>
  make(name, { fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash, "stroke-linejoin": "round", ...more });

// The label of each line, with a sample of its colour and dashes.
function legend(series) {
  const named = series.filter((line) => line.label);
  if (!named.length) return [];
  const list = document.createElement("ul");
  list.className = "legend";
  for (const line of named) {
    const sample = make("svg", { width: 28, height: 10, "aria-hidden": "true" });
    sample.append(stroke("line", line, { x1: 0, x2: 28, y1: 5, y2: 5 }));
    const item = document.createElement("li");
    item.append(sample, line.label);
    list.append(item);
  }
  return [list];
}
