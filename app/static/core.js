// What every page uses: words, numbers, calls, live values, messages. Everything from outside becomes text
// (x-text, textContent), never markup.

import Alpine from "./vendor/alpine.js";

const parse = (id) => JSON.parse(document.getElementById(id).textContent);

export const data = parse("data");
export const language = document.documentElement.lang;
const words = parse("words");
const plural = new Intl.PluralRules(language);

// --- words and numbers ---------------------------------------------------------------------------------------------

export const t = (key, values = {}) => words[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
t.or = (key, otherwise, values) => (Object.hasOwn(words, key) ? t(key, values) : otherwise);
t.n = (key, count, values = {}) => {
  const form = `${key}.${plural.select(count)}`;
  return t(form in words ? form : `${key}.other`, { count: number(count), ...values });
};

const formats = new Map();
function format(options) {
  const name = JSON.stringify(options);
  if (!formats.has(name)) formats.set(name, new Intl.NumberFormat(language, options));
  return formats.get(name);
}

export const number = (value, digits = 0) =>
  format({ minimumFractionDigits: digits, maximumFractionDigits: digits }).format(value);
export const percent = (share, digits = 0) => format({ style: "percent", maximumFractionDigits: digits }).format(share);
const unit = (value, name, digits = 0, unitDisplay = "short") =>
  format({ style: "unit", unit: name, unitDisplay, maximumFractionDigits: digits }).format(value);

export function bytes(count) {
  const units = ["byte", "kilobyte", "megabyte", "gigabyte", "terabyte"];
  let power = 0;
  for (; count >= 1000 && power < units.length - 1; power += 1) count /= 1000;
  return power ? unit(count, units[power], count < 100 ? 1 : 0) : unit(count, "byte", 0, "long");
}

// Parses a number with a decimal comma or point; null for an empty field. Throws an error with a message for the user
// if the text is no number or is ambiguous: "1,000" is 1000 or 1, depending on the language (1000 if `whole` is set).
export function readNumber(text, { whole = false, least = -Infinity, most = Infinity } = {}) {
  let written = text.normalize("NFKC").trim(); // also converts full-width digits
  if (!written) return null;
  if (whole && /^-?\d{1,3}(,\d{3})+$/.test(written)) written = written.replaceAll(",", "");
  const isNumber = whole ? /^-?\d+$/ : /^-?(\d+[.,]?\d*|[.,]\d+)(e-?\d+)?$/;
  if (!isNumber.test(written) || /^-?[1-9]\d{0,2},\d{3}$/.test(written)) {
    throw new Error(whole ? t("invalid.int_parsing") : t("invalid.float_parsing"));
  }
  const value = Number(written.replace(",", "."));
  if (value < least) throw new Error(t("invalid.greater_than_equal", { ge: least }));
  if (value > most) throw new Error(t("invalid.less_than_equal", { le: most }));
  return value;
}

// Formats a duration with its two largest units.
export function seconds(value) {
  if (value < 1) return unit(value * 1000, "millisecond", value < 0.01 ? 1 : 0);
  if (value < 60) return unit(value, "second", value < 10 ? 1 : 0);
  const steps = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  const at = steps.findIndex(([size]) => value >= size);
  const parts = steps.slice(at, at + 2).map(([size, name], index) => {
    const count = Math.floor(index ? (value % steps[at][0]) / size : value / size);
    return count ? unit(count, name) : "";
  });
  return parts.filter(Boolean).join(" ");
}

const relative = new Intl.RelativeTimeFormat(language, { numeric: "auto" });
const CLOCK_MS = 30_000;
const clock = Alpine.reactive({ ticks: 0 });
const tick = () => (clock.ticks += 1);
setInterval(tick, CLOCK_MS);
document.addEventListener("visibilitychange", tick);
// What shows an age is drawn again as the clock ticks.
export function ago(unixSeconds) {
  void clock.ticks;
  const past = Math.max(0, Date.now() / 1000 - unixSeconds); // clocks may differ
  const steps = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  const [size, name] = steps.find(([stepSeconds]) => past >= stepSeconds) ?? steps[3];
  return relative.format(-Math.floor(past / size), name);
}
const time = new Intl.DateTimeFormat(language, { timeStyle: "medium" });
const day = new Intl.DateTimeFormat(language, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
// Formats a moment: only the time if it is today, else with the day.
export function when(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  return (at.toDateString() === new Date().toDateString() ? time : day).format(at);
}
export const moment = (unixSeconds) =>
  new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "medium" }).format(new Date(unixSeconds * 1000));

// --- the address ---------------------------------------------------------------------------------------------------

// Filters live in the address, so that going back restores them.
export const address = (name, usual = "") => new URLSearchParams(location.search).get(name) ?? usual;
export function keepInAddress(values) {
  const kept = new URLSearchParams(Object.entries(values).filter(([, value]) => value));
  history.replaceState(null, "", kept.size ? `?${kept}` : location.pathname);
}

// --- calls ---------------------------------------------------------------------------------------------------------

export class ApiError extends Error {
  constructor(message, code, status, answer = null) {
    super(message);
    Object.assign(this, { code, status, answer });
  }
}

// Safari shows a page from its back/forward cache as it was left: out of date, and perhaps signed out.
addEventListener("pageshow", (event) => event.persisted && location.reload());

let isLeaving = false;
export const isSigningInAgain = () => isLeaving;
// Leaves for the sign-in page, which leads back here. If several calls find the session ended, only the first leaves.
export function signInAgain() {
  if (isLeaving || !document.body.dataset.area) return;
  isLeaving = true;
  location.assign(`/admin/login?ended=1&next=${encodeURIComponent(location.pathname + location.search)}${location.hash}`);
}

// JSON in, JSON out. Throws ApiError; a session that has ended leads to the sign-in page.
export async function api(method, path, body, options = {}) {
  const headers = method === "GET" ? {} : { "content-type": "application/json" };
  let response;
  try {
    const text = method === "GET" ? undefined : JSON.stringify(body ?? {});
    response = await fetch(path, { method, headers, body: text, cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(t("core.offline"), "offline", 0);
  }
  if (response.status === 401) signInAgain();
  const answer = response.status === 204 ? null : await response.json().catch(() => null);
  if (response.ok) return answer;
  const problem = answer?.error ?? { message: t("core.failed", { status: response.status }), code: "http" };
  throw new ApiError(problem.message, problem.code, response.status, answer);
}

// Runs `work`, shows `done` or the error as a toast, and returns whether the work succeeded.
export async function attempt(work, done = "") {
  try {
    await work();
    if (done) toast(done, "good");
    return true;
  } catch (error) {
    toast(error.message, "bad");
    return false;
  }
}

// For calls whose answers may overtake one another. Returns a function to run when a call begins; that function returns
// another one, which tells whether the call is still the latest.
export function latestOnly() {
  let latest = 0;
  return () => {
    const number = (latest += 1);
    return () => number === latest;
  };
}

// Returns the `read(…)` method of a component that shows a call's answer. If answers overtake one another, only that of
// the latest call is shown; `problem` gets the message of an error.
export function reader(call, show) {
  const begin = latestOnly();
  return async function read(...given) {
    const isLatest = begin();
    try {
      const answer = await call.apply(this, given);
      if (!isLatest()) return;
      show.call(this, answer, ...given);
      this.problem = "";
    } catch (error) {
      if (isLatest()) this.problem = error.message;
    }
  };
}

// --- live values ---------------------------------------------------------------------------------------------------

const RETRY_MS = 2000;
const handlers = new Map();
export const link = Alpine.reactive({ state: "connecting", isRestarting: false });
let source = null;
let isPlanned = false;

// Calls handler(value, topic) with the whole value of a topic whenever it changes. A page has one connection.
export function live(topics, handler) {
  for (const topic of [topics].flat()) handlers.set(topic, [...(handlers.get(topic) ?? []), handler]);
  plan();
}

// Calls handler() when what `part` takes from a topic's value has changed since the page was opened.
export function liveChange(topic, part, handler) {
  let known = null;
  live(topic, (value) => {
    const present = JSON.stringify(part(value));
    if (known !== null && present !== known) handler();
    known = present;
  });
}

// Calls handler() when a setting has changed.
export const settingsChange = (handler) => liveChange("settings", (count) => count, handler);

// Calls handler() when other models, or other settings of a model, may be there.
export function modelsChange(handler) {
  settingsChange(handler);
  liveChange("downloads", ({ downloads }) => downloads.filter(({ state }) => state === "done").map(({ id }) => id), handler);
}

function plan() {
  if (isPlanned) return;
  isPlanned = true;
  queueMicrotask(() => {
    isPlanned = false;
    connect();
  });
}

function connect() {
  source?.close();
  source = null;
  if (document.hidden || !handlers.size) return;
  const opened = (source = new EventSource(`/admin/api/live?topics=${[...handlers.keys()].join(",")}`));
  opened.onopen = () => (link.state = "open");
  opened.onerror = () => lose(opened);
  for (const [topic, listening] of handlers) {
    opened.addEventListener(topic, (event) => {
      const value = JSON.parse(event.data);
      for (const handler of listening) handler(value, topic);
    });
  }
}

function lose(lost) {
  if (lost !== source) return;
  link.state = "gone";
  source.close();
  setTimeout(() => lost === source && checkAndConnect(), RETRY_MS);
}

// A refused EventSource gives no status, so a plain call finds out whether the session has ended.
async function checkAndConnect() {
  await api("GET", "/admin/api/live/topics").catch(() => null);
  connect();
}

document.addEventListener("visibilitychange", connect);

// --- messages ------------------------------------------------------------------------------------------------------

const TOAST_MS = 6000;

export function toast(message, tone = "") {
  const node = document.createElement("p");
  node.className = `toast ${tone}`;
  node.textContent = message;
  document.getElementById("toasts").replaceChildren(node);
  node.addEventListener("click", () => node.remove());
  setTimeout(() => node.remove(), TOAST_MS);
}

// Asks the user to confirm; resolves to true or false.
export function confirm({ title, text = "", action, tone = "" }) {
  const box = document.getElementById("confirm");
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-text").textContent = text;
  const yes = document.getElementById("confirm-yes");
  yes.textContent = action;
  yes.className = tone === "bad" ? "danger" : "primary";
  // `close` events arrive late: an earlier question may be closed but unresolved. Resolve it before this one opens.
  box.onclose?.(new Event("close"));
  box.returnValue = "no";
  box.showModal();
  return new Promise((resolve) => {
    box.onclose = () => box.open || resolve(box.returnValue === "yes");
  });
}

export async function copy(text) {
  const isCopied = await (navigator.clipboard?.writeText(text).then(() => true, () => false) ?? copySelected(text));
  toast(isCopied ? t("core.copied") : t("core.uncopied"), isCopied ? "good" : "bad");
}

// Copies from a field: over http from another computer, browsers have no `navigator.clipboard`.
function copySelected(text) {
  const focused = document.activeElement;
  const field = Object.assign(document.createElement("textarea"), { value: text, readOnly: true, className: "hidden" });
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.focus({ preventScroll: true });
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused.focus({ preventScroll: true });
  return isCopied;
}

// When a pressed button hides itself, another one of its group takes the focus, such as Resume that of Pause.
const isHidden = (node) => !node.getClientRects().length;
new MutationObserver(() => {
  const pressed = document.activeElement;
  const group = pressed?.matches("button") && isHidden(pressed) ? pressed.closest(".actions") : null;
  if (!group) return;
  const find = () => [...group.querySelectorAll("button:enabled")].find((button) => !isHidden(button));
  setTimeout(() => [pressed, document.body].includes(document.activeElement) && find()?.focus()); // `x-show` shows late
}).observe(document.body, { subtree: true, attributeFilter: ["style"] });

// Whether a key is a plain Enter or Escape, not one that ends an IME conversion (Japanese, Chinese, Korean), which
// Safari marks only by key code 229 (WebKit 165004).
const isPlain = (event) => !event.isComposing && event.keyCode !== 229;
export const isEnter = (event) => event.key === "Enter" && isPlain(event);
export const isEscape = (event) => event.key === "Escape" && isPlain(event);

// --- components ----------------------------------------------------------------------------------------------------

// Registers a component for x-data="name"; call it while the module runs, before boot.js starts Alpine.
export const component = (name, factory) => Alpine.data(name, factory);
export function start() {
  Alpine.start();
  delete document.body.dataset.starting; // from here on buttons work
}

for (const [name, help] of Object.entries({ number, percent, bytes, seconds, ago, moment, when, t })) {
  Alpine.magic(name, () => help);
}

// Stores language and theme for this browser; the server's settings are the defaults for other browsers.
const YEAR_SECONDS = 31536000;
export const remember = (name, value) => {
  document.cookie = `paceline_${name}=${value}; path=/admin; max-age=${YEAR_SECONDS}; samesite=strict`;
  return document.cookie; // reading waits for the write, else an immediate reload may not send the cookie
};
