// API keys and signed-in browsers, on the settings page. Only this page's memory has a new key, until it is hidden.

import { ago, api, attempt, component, confirm, copy, moment, t } from "./core.js";

const KEYS = "/admin/api/keys";
const SCOPES = { inference: () => t("keys.inference"), admin: () => t("keys.admin") };

const keyRow = (key) => ({
  ...key,
  scopeWords: SCOPES[key.scope](),
  revokeWords: t("keys.revoke_named", { name: key.name }),
  get usedWords() {
    const used = key.used_at ? t("keys.used", { ago: ago(key.used_at) }) : t("keys.unused");
    return `${t("keys.created", { moment: moment(key.created_at) })} · ${used}`;
  },
});

component("keys", () => ({
  rows: [],
  name: "",
  scope: "inference",
  text: "",
  made: 0,
  problem: "",
  isBusy: false,
  isLoaded: false,
  required: false,
  environment: false,

  init() {
    return this.load();
  },

  get isEmpty() {
    return this.isLoaded && !this.rows.length;
  },

  get tone() {
    return this.required ? "good" : "busy";
  },

  get stateWords() {
    if (!this.isLoaded) return "";
    return this.required ? t("keys.required") : t("keys.not_required");
  },

  async load() {
    try {
      const { keys, required, environment } = await api("GET", KEYS);
      Object.assign(this, { rows: keys.map(keyRow), required, environment, isLoaded: true, problem: "" });
    } catch (error) {
      this.problem = error.message;
    }
  },

  async create() {
    if (this.isBusy) return;
    this.isBusy = true;
    await attempt(async () => {
      const { key, text } = await api("POST", KEYS, { name: this.name, scope: this.scope });
      Object.assign(this, { text, made: key.id, name: "", scope: "inference" });
    });
    this.isBusy = false;
    await this.load();
  },

  async revoke(row) {
    const title = t("keys.revoke_named", { name: row.name });
    if (!(await confirm({ title, text: t("keys.revoke_text"), action: t("keys.revoke"), tone: "bad" }))) return;
    const isGone = await attempt(() => api("DELETE", `${KEYS}/${row.id}`), t("keys.revoked"));
    if (isGone && row.id === this.made) this.hide();
    await this.load();
  },

  take() {
    return copy(this.text);
  },

  hide() {
    this.text = "";
  },
}));

component("sessions", () => ({
  rows: [],
  current: "",
  password: "",
  problem: "",
  isBusy: false,

  init() {
    return this.load();
  },

  async load() {
    try {
      const { sessions } = await api("GET", "/admin/api/session");
      this.rows = sessions.map((session) => ({
        ...session,
        browserWords: session.browser || t("sessions.unknown"),
        get seenWords() {
          return t("sessions.seen", { ago: ago(session.seen_at) });
        },
      }));
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
  },

  async change() {
    if (this.isBusy) return;
    this.isBusy = true;
    const body = { current: this.current, password: this.password };
    const isDone = await attempt(() => api("POST", "/admin/api/password", body), t("sessions.changed"));
    this.isBusy = false;
    if (!isDone) return;
    Object.assign(this, { current: "", password: "" });
    await this.load();
  },

  async endAll() {
    const wording = { title: t("sessions.end_all"), text: t("sessions.end_all_text"), action: t("sessions.end_all") };
    if (!(await confirm({ ...wording, tone: "bad" }))) return;
    if (await attempt(() => api("DELETE", "/admin/api/sessions"))) location.assign("/admin/login");
  },
}));
