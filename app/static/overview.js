// The overview: running requests, speed and memory; restarts the worker and releases quarantined models.

import { chart } from "./chart.js";
import { address, api, attempt, component, confirm, copy, data, keepInAddress, live, number, percent, seconds, t } from "./core.js";
import { drafterWords, draftsAddress, methodWords, modelAddress, paysAddress, usedBytes } from "./model_words.js";
import { gainRow } from "./pays_words.js";
import { reasonWords } from "./reason_words.js";
import { requestWords } from "./running.js";

const SMOOTHED_SECONDS = 3;

// Moving average over the last few seconds: the values of single seconds vary too much.
const smooth = (values) =>
  values.map((_, index) => {
    const part = values.slice(Math.max(0, index - SMOOTHED_SECONDS + 1), index + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
// The next round number that is easy to halve.
function ceiling(highest) {
  const power = 10 ** Math.floor(Math.log10(Math.max(highest, 10)));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= highest);
}

// Tokens per second for each of the last `count` minutes; the last value covers the 60 seconds up to now.
function byMinutes({ tokens }, minutes, count) {
  const recent = tokens.slice(-60).reduce((sum, perSecond) => sum + perSecond, 0);
  return [...minutes.slice(1 - count), recent].map((perMinute) => perMinute / 60);
}
const RANGES = {
  minutes: { period: 1, speeds: (pace) => smooth(pace.tokens) },
  hour: { period: 60, speeds: (pace, minutes) => byMinutes(pace, minutes, 60) },
  day: { period: 60, speeds: (pace, minutes) => byMinutes(pace, minutes, 24 * 60) },
};
const USUAL = "minutes";

function course(speeds, period) {
  const top = ceiling(Math.max(...speeds));
  const past = (at) => [at, t("overview.past", { time: seconds(-at * period) })];
  return {
    x: [-speeds.length, -1],
    top,
    xTicks: [-speeds.length, -speeds.length / 2].map(past).concat([[-1, t("overview.present")]]),
    yTicks: [0, top / 2, top].map((speed) => [speed, number(speed)]),
    series: [{ colour: "var(--series-1)", isArea: true, points: speeds.map((speed, at) => [at - speeds.length, speed]) }],
  };
}

component("overview", () => ({
  ...requestWords,
  state: data.state,
  pace: data.pace,
  minutes: data.minutes,
  range: Object.hasOwn(RANGES, address("range")) ? address("range") : USUAL,
  requests: data.requests,
  measuring: null,
  gains: data.gains,

  init() {
    live("state", (state) => (this.state = state));
    live("pace", (pace) => (this.pace = pace));
    live("minutes", (minutes) => (this.minutes = minutes));
    this.$watch("range", (range) => keepInAddress({ range: range === USUAL ? "" : range }));
    live("measuring", ({ active, gains }) => Object.assign(this, { measuring: active, gains }));
    live("requests", (requests) => (this.requests = requests));
    this.draw = chart(this.$refs.chart);
    for (const name of ["pace", "minutes", "range"]) this.$watch(name, () => this.redraw());
    this.redraw();
  },

  get isLoaded() {
    return this.state.models.length + this.state.loading.length > 0;
  },
  get loadedWords() {
    return this.state.models.map((model) => model.id).join(", ") || t("overview.head_none");
  },
  get speeds() {
    return RANGES[this.range].speeds(this.pace, this.minutes);
  },
  redraw() {
    this.draw(course(this.speeds, RANGES[this.range].period));
  },
  get speed() {
    const speed = this.pace.tokens_per_second;
    return number(speed, speed && speed < 100 ? 1 : 0);
  },
  get hasTraffic() {
    return this.speeds.some((speed) => speed > 0);
  },
  get hasBegun() {
    return this.requests.recent.length + this.requests.running.length > 0 || this.hasTraffic;
  },
  get isNew() {
    return !this.hasBegun;
  },
  get measureAddress() {
    const [model] = this.state.models;
    return model ? draftsAddress(model.id) : "/admin/models";
  },
  take(event) {
    return copy(event.currentTarget.dataset.copy);
  },
  get acceptance() {
    return this.pace.acceptance === null ? t("core.none") : percent(this.pace.acceptance);
  },
  get chartWords() {
    return t("overview.chart", { speed: this.speed, peak: number(Math.max(...this.speeds), 1) });
  },
  get memoryShare() {
    const { active_bytes: active, ceiling_bytes: ceiling } = this.state.memory;
    return ceiling ? active / ceiling : 0;
  },
  get nothingRuns() {
    return !this.requests.running.length && !this.measuring;
  },
  get measuringWords() {
    return this.measuring ? t("overview.measuring", { model: this.measuring.model_id }) : "";
  },
  get measuringAddress() {
    return this.measuring ? paysAddress(this.measuring.model_id) : "";
  },
  // The worker does not know of a request whose model is still loading.
  get waiting() {
    return Math.max(this.state.waiting, this.state.open_requests - this.state.running);
  },
  get runningWords() {
    return t("overview.open", { running: number(this.state.running), waiting: number(this.waiting) });
  },
  get memoryWords() {
    return percent(this.memoryShare, this.memoryShare < 0.1 ? 1 : 0);
  },
  get pressureWords() {
    const words = { warning: t("overview.pressure_warning"), critical: t("overview.pressure_critical") };
    return words[this.state.memory.pressure] ?? "";
  },
  methodName: methodWords,
  get lastExit() {
    return this.reasonWords(this.state.worker.last_exit);
  },
  reasons: (model) => Object.entries(model.unavailable).map(([method, why]) => ({ method, words: reasonWords(why) })),
  used: usedBytes,
  drafters: ({ drafts }) => drafterWords(drafts),
  gain({ id, methods }) {
    const unmeasured = methods.length ? { short: t("pays.measure"), words: t("drafts.unmeasured") } : {};
    return gainRow(this.gains[id]) ?? unmeasured;
  },
  paysPage: ({ id }) => paysAddress(id),
  modelPage: ({ id, methods }) => (methods.length ? draftsAddress(id) : modelAddress(id)),
  fraction: (model) => percent(model.fraction),

  get workerTone() {
    return this.state.worker.ready ? "good" : "busy";
  },
  get workerWords() {
    const worker = this.state.worker;
    if (worker.ready) return t("status.ready");
    if (worker.renewing) return t("overview.renewing");
    return worker.restarts ? t("status.restarting") : t("status.starting");
  },

  async restart() {
    const count = this.state.running + this.waiting;
    const text = count ? t.n("overview.restart_busy", count) : t("overview.restart_idle");
    const action = t("overview.restart");
    if (!(await confirm({ title: t("overview.restart_title"), text, action, tone: count ? "bad" : "" }))) return;
    await attempt(() => api("POST", "/admin/api/worker/restart"), t("overview.restarting"));
  },
  async drain() {
    await attempt(() => api("POST", "/admin/api/worker/drain"), t("overview.drained"));
  },
  async release(model) {
    await attempt(() => api("POST", "/admin/api/quarantine/release", { model: model.id }), t("overview.released"));
  },
  async loadStarter() {
    await attempt(() => api("POST", "/admin/api/models/load", { model: data.starter }));
  },
}));

// The notice that steps of the first run remain.
component("unfinished", () => ({
  isLeft: true,

  async end() {
    this.isLeft = !(await attempt(() => api("POST", "/admin/api/welcome", { done: "all" })));
  },
}));
