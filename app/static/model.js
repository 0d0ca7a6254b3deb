// The settings of one model: each row saves its change immediately; a notice offers a reload for changes that need one.

import { api, component, data, live, readNumber, seconds, t, toast } from "./core.js";
import { follow, lines, settingRow } from "./setting_form.js";
import { liveStateOf, settingsCall } from "./model_words.js";

follow(settingsCall(data.place));

const RELOAD = "model-needs-reload";

const READ = {
  switch: (value) => value || null,
  list: (text) => (lines(text).length ? lines(text) : null),
  number: (text, { whole }) => readNumber(text, { whole }),
  long_text: (text) => text || null,
};

component("modelSettings", () => ({
  mustReload: false,
  isBusy: false,
  isLoaded: data.model.state === "loaded",

  init() {
    live("state", (state) => {
      this.isLoaded = liveStateOf(state, data.model.id)?.state === "loaded";
      if (!this.isLoaded) this.mustReload = false;
    });
    addEventListener(RELOAD, () => (this.mustReload = this.isLoaded));
  },

  async reload() {
    this.isBusy = true;
    try {
      const { became } = await api("POST", "/admin/api/models/reload", { model: data.model.id });
      this.mustReload = became === "in_use";
      toast(became === "in_use" ? t("drafts.felt_later") : t("model_settings.reloaded"), became === "in_use" ? "" : "good");
    } catch (error) {
      toast(error.message, "bad");
    }
    this.isBusy = false;
  },
}));

component("modelSetting", () => settingRow({
  show({ kind, value }) {
    if (kind === "switch") return value === true;
    if (kind === "list") return (value ?? []).join("\n");
    return value === null ? "" : String(value);
  },
  read: (row, value) => (READ[row.kind] ?? ((text) => text.trim() || null))(value, row),

  async send(value) {
    const { settings, reload } = await api("PATCH", settingsCall(data.place), { [this.row.name]: value });
    this.take(settings.find((row) => row.name === this.row.name));
    toast(this.row.takes_effect === "now" ? t("settings.saved_now") : t("settings.saved_reload"), "good");
    if (reload === "needed") dispatchEvent(new Event(RELOAD));
  },

  get isStored() {
    return this.row.value !== null;
  },

  get usual() {
    const { inherited, unit } = this.row;
    if (inherited === null || inherited === "") return this.row.name === "alias" ? "" : t("model_settings.unset");
    return unit === "seconds" ? seconds(inherited) : String(inherited);
  },
}));

component("modelProfiles", () => ({
  name: "",

  open() {
    location.href = `/admin/models/${encodeURIComponent(`${data.model.id}:${this.name.trim()}`)}`;
  },
}));
