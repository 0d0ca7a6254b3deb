// The last script of every page: the frame around it, then Alpine starts with all that the page has registered.

import "./palette.js";
import { api, attempt, component, link, live, start, t } from "./core.js";

const THEMES = ["system", "light", "dark"];
const root = document.documentElement;

component("frame", () => ({
  open: false,
  theme: root.dataset.theme,
  worker: null,

  init() {
    live("worker", (worker) => (this.worker = worker));
  },

  get tone() {
    if (link.state === "gone") return "bad";
    if (link.state === "connecting" || !this.worker) return "idle";
    return this.worker.ready && !this.worker.draining ? "good" : "busy";
  },

  get words() {
    if (link.state === "gone") return t("status.gone");
    if (!this.worker) return t("status.connecting");
    if (this.worker.draining) return t("status.draining");
    if (this.worker.ready) return t("status.ready");
    return this.worker.restarts ? t("status.restarting") : t("status.starting");
  },

  get themeWords() {
    return { system: t("theme.system"), light: t("theme.light"), dark: t("theme.dark") }[this.theme];
  },

  toggle() {
    this.open = !this.open;
  },

  paint() {
    this.theme = THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length];
    root.dataset.theme = this.theme;
    return save({ theme: this.theme });
  },

  async speak(event) {
    if (await save({ language: event.target.value })) location.reload();
  },

  async leave() {
    if (await attempt(() => api("POST", "/admin/api/logout"))) location.assign("/admin/login");
  },
}));

component("lost", () => ({
  get isLost() {
    return link.state === "gone";
  },
}));

const save = (settings) => attempt(() => api("PATCH", "/admin/api/settings", settings));

start();
