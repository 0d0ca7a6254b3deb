// The last script of every page: registers the frame's components, then starts Alpine.

import "./palette.js";
import { api, attempt, component, copy, link, live, remember, start, t } from "./core.js";

const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme === "system" ? system.matches : root.dataset.theme === "dark");

component("frame", () => ({
  open: false,
  isDark: isDark(),
  worker: null,

  init() {
    live("worker", (worker) => (this.worker = worker));
    system.addEventListener("change", () => (this.isDark = isDark()));
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
    return this.isDark ? t("theme.light") : t("theme.dark");
  },

  toggle() {
    this.open = !this.open;
  },

  // Switches between light and dark; if the system already has the new theme, the page follows the system from then on.
  paint() {
    const wanted = isDark() ? "light" : "dark";
    root.dataset.theme = (wanted === "dark") === system.matches ? "system" : wanted;
    remember("theme", root.dataset.theme);
    this.isDark = isDark();
  },

  async leave() {
    if (await attempt(() => api("POST", "/admin/api/logout"))) location.assign("/admin/login");
  },
}));

component("language", () => ({
  speak(event) {
    remember("language", event.target.value);
    location.reload();
  },
}));

component("lost", () => ({
  get isLost() {
    return link.state === "gone" && !link.isRestarting;
  },
}));

// The notice of a newer version; once dismissed, it stays hidden until the next version.
component("news", () => ({
  isShown: true,

  copyCommand() {
    return copy(this.$root.querySelector("code").textContent);
  },

  putAway() {
    remember("update", this.$root.dataset.version);
    this.isShown = false;
  },
}));

start();
