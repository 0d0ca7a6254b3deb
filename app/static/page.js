// What every part of the page uses: words, numbers, and elements made of text. Everything from outside becomes
// text (textContent, append), never markup.

export const data = JSON.parse(document.getElementById("data").textContent);
export const byId = (id) => document.getElementById(id);
export const t = (key, values = {}) => data.words[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
export const number = (value, digits = 0) =>
  new Intl.NumberFormat(data.language, { minimumFractionDigits: digits, maximumFractionDigits: digits }).format(value);
export const percent = (share) => new Intl.NumberFormat(data.language, { style: "percent" }).format(share);

export function bytes(count) {
  const units = ["byte", "kilobyte", "megabyte", "gigabyte", "terabyte"];
  let power = 0;
  for (; count >= 1000 && power < units.length - 1; power += 1) count /= 1000;
  const format = { style: "unit", unit: units[power], maximumFractionDigits: count < 100 && power ? 1 : 0 };
  return new Intl.NumberFormat(data.language, format).format(count);
}

export function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== ""));
  return node;
}

// Replaces the content only when it says something new, so that focus and selections survive a refresh.
const shown = new Map();
export function show(node, value, build) {
  const signature = JSON.stringify(value);
  if (shown.get(node) === signature) return;
  shown.set(node, signature);
  node.replaceChildren(...build());
}
