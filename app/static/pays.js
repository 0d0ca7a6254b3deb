// Does drafting pay? Starts and follows a measurement, draws it, shows its recommendation, and applies it.

import { api, attempt, bytes, component, confirm, data, live, moment, number, reader, t, toast } from "./core.js";
import { becameWords, draftsCall, times } from "./model_words.js";
import { plot } from "./pays_chart.js";
import {
  adviceWords, answerOf, batchOf, cellWords, changeLines, changeRow, disturbedNow, doubtsOf, historyRow, leftWords, MEASUREMENTS,
  notesOf, phaseWords, settingRow, settingWords, telling,
} from "./pays_words.js";

const keyOf = ({ rows, context }) => `${rows}/${context}`;

component("pays", () => ({
  kept: [],
  elsewhere: [],
  drafterBytes: {},
  active: null,
  opened: 0,
  shownKey: "", // else the first cell
  isRead: false,
  isBusy: false,
  problem: "",
  refusal: "",
  prompt: "",
  minutes: 2,
  several: true,
  isWhole: false,
  draw: (_cell) => {},

  init() {
    this.draw = plot(this.$refs.plot);
    live("measuring", (measuring) => this.follow(measuring));
    this.$watch("opened", () => this.paint());
    return this.read();
  },

  // --- what is shown ---------------------------------------------------------------------------------------------

  get isOurs() {
    return this.active?.model_id === data.model.id;
  },
  get current() {
    return this.kept.find((row) => row.id === this.opened) ?? null;
  },
  // The report on screen: the partial one of the running measurement, else that of the opened measurement.
  get report() {
    if (this.isOurs && this.active.report.cells.length) return this.active.report;
    return this.current?.report ?? { cells: [], doubts: [], choice: null };
  },
  get isFinal() {
    return !this.isOurs && Boolean(this.current);
  },
  get shownCells() {
    return this.report.cells;
  },
  get cell() {
    return this.shownCells.find((cell) => keyOf(cell) === this.shownKey) ?? this.shownCells[0] ?? null;
  },
  get cells() {
    return this.shownCells.map((cell) => ({ ...cell, key: keyOf(cell), words: cellWords(cell), isShown: cell === this.cell }));
  },
  get hasCells() {
    return this.shownCells.length > 0;
  },
  get hasSeveralCells() {
    return this.shownCells.length > 1;
  },
  get settings() {
    if (!this.cell) return [];
    const shown = this.isWhole ? this.cell.settings : telling(this.cell);
    return shown.map((setting) => settingRow(setting, this.cell));
  },
  get hasMore() {
    return Boolean(this.cell) && telling(this.cell).length < this.cell.settings.length;
  },
  get wholeWords() {
    return this.isWhole ? t("pays.fewer") : t.n("pays.whole", this.cell?.settings.length ?? 0);
  },
  get isWaiting() {
    return !this.isRead && !this.problem;
  },
  get isEmpty() {
    return this.isRead && !this.hasCells && !this.isOurs;
  },
  get resultTitle() {
    return this.isOurs ? t("pays.so_far") : t("pays.result");
  },
  get momentWords() {
    return this.isFinal ? moment(this.current.created_at) : "";
  },
  get answer() {
    return this.isFinal ? answerOf(this.report) : "";
  },
  get batchWords() {
    return this.isFinal ? batchOf(this.report) : "";
  },
  get doubts() {
    return this.isFinal ? doubtsOf(this.report) : [];
  },
  get notes() {
    return this.isFinal ? notesOf(this.current, this.cell) : "";
  },
  get adviceWords() {
    return this.isFinal ? adviceWords(this.report) : "";
  },
  get changes() {
    return this.isFinal ? this.report.advice.changes.map(changeRow) : [];
  },
  // The recommended drafters, and the memory that they need.
  get recommended() {
    const drafts = this.isFinal ? this.report.advice.changes.find(({ name }) => name === "drafts") : null;
    return drafts?.new ?? [];
  },
  get extraWords() {
    const known = this.recommended.filter((id) => id in this.drafterBytes);
    return known.length ? bytes(known.reduce((sum, id) => sum + this.drafterBytes[id], 0)) : "";
  },
  get elsewhereWords() {
    return this.elsewhere.length && this.changes.length ? t("drafts.elsewhere", { names: this.elsewhere.join(", ") }) : "";
  },
  get plotWords() {
    const drafting = this.settings.filter((setting) => setting.method !== "off");
    const gains = drafting.map((setting) => `${setting.words}: ${times(setting.ratio)}`);
    return t("pays.plot", { settings: gains.join("; ") });
  },
  get rows() {
    return this.kept.map((row) => historyRow(row, this.opened));
  },
  get canApply() {
    return this.changes.length > 0;
  },
  // With doubts, the page highlights measuring again instead of applying.
  get isClear() {
    return this.canApply && !this.doubts.length;
  },
  get applyTone() {
    return this.isClear ? "primary" : "";
  },
  get beginTone() {
    return this.isClear ? "" : "primary";
  },

  // --- the running measurement -----------------------------------------------------------------------------------

  get phaseWords() {
    if (!this.active) return "";
    return this.isOurs ? phaseWords(this.active.phase) : t("drafts.measuring", { model: this.active.model_id });
  },
  get stepWords() {
    const ask = this.active?.ask;
    if (!ask) return "";
    const setting = settingWords({ method: ask.method, num_draft_tokens: ask.drafts });
    return t.n("pays.step", ask.rows, { setting, round: number(ask.round), rounds: number(ask.rounds) });
  },
  get share() {
    return this.active ? Math.min(1, Math.max(0, 1 - this.active.seconds_left / (60 * this.active.minutes))) : 0;
  },
  get leftWords() {
    return this.active ? leftWords(this.active.seconds_left) : "";
  },
  get disturbedWords() {
    return this.active ? disturbedNow(this.active.disturbed) : "";
  },
  get cannotBegin() {
    return this.isBusy || data.model.state === "unusable" || data.model.state === "too_large";
  },

  follow({ active, last }) {
    const hasEnded = this.isOurs && active?.model_id !== data.model.id;
    this.active = active;
    if (hasEnded) this.end(last);
    else if (this.isOurs) this.paint();
  },
  // A restarted server knows of no last measurement, and another model's may have ended while the page was hidden.
  async end(last) {
    const before = this.kept[0]?.id;
    const { outcome, number, problem } = last?.model_id === data.model.id ? last : {};
    await this.read(number);
    if (outcome === "failed") this.refusal = problem;
    else if (outcome || this.kept[0]?.id !== before) toast(outcome === "stopped" ? t("pays.stopped") : t("pays.done"), "good");
    else this.refusal = t("pays.lost");
  },

  read: reader(
    () => api("GET", `${MEASUREMENTS}?model=${encodeURIComponent(data.model.id)}`),
    function show({ measurements, active, elsewhere }, number = 0) {
      const known = measurements.some((row) => row.id === this.opened) ? this.opened : (measurements[0]?.id ?? 0);
      Object.assign(this, { kept: measurements, active, elsewhere, opened: number || known, isRead: true });
      this.paint();
      if (measurements.length) this.weigh();
    },
  ),
  async weigh() {
    const { candidates } = await api("GET", draftsCall(data.model.id)).catch(() => ({ candidates: [] }));
    this.drafterBytes = Object.fromEntries(candidates.map(({ id, extra }) => [id, extra.total_bytes]));
  },
  paint() {
    this.$nextTick(() => this.cell && this.draw(this.cell));
  },
  show(cell) {
    this.shownKey = cell.key;
    this.paint();
  },
  showWhole() {
    this.isWhole = !this.isWhole;
  },
  open(row) {
    this.opened = row.id;
  },

  // --- actions ---------------------------------------------------------------------------------------------------

  async begin() {
    this.refusal = "";
    const prompt = this.prompt.trim();
    const body = { model: data.model.id, prompts: prompt ? [prompt] : [], minutes: this.minutes, grid: this.several ? "several" : "one" };
    try {
      this.active = (await api("POST", MEASUREMENTS, body)).active;
    } catch (error) {
      this.refusal = error.message;
    }
  },
  async stop() {
    await attempt(() => api("DELETE", `${MEASUREMENTS}/current`));
  },
  applyRecommended() {
    return this.apply({});
  },
  canPick(setting) {
    return this.isFinal && !setting.isInUse;
  },
  async pick(setting) {
    const wording = { title: setting.pickWords, text: changeLines(setting.changes), action: t("pays.apply_these") };
    if (!(await confirm(wording))) return;
    const { method, num_draft_tokens: length } = setting;
    await this.apply({ method, num_draft_tokens: length || null, rows: this.cell.rows });
  },
  async apply(body) {
    this.isBusy = true;
    await attempt(async () => {
      const { became } = await api("POST", `${MEASUREMENTS}/${this.opened}/apply`, body);
      toast(becameWords(became), "good");
      await this.read();
    });
    this.isBusy = false;
  },
  async remove(row) {
    if (!(await confirm({ title: row.removeWords, action: t("pays.remove"), tone: "bad" }))) return;
    if (await attempt(() => api("DELETE", `${MEASUREMENTS}/${row.id}`))) await this.read();
  },
}));
