// Signing in: the set-up page and the sign-in page. The set-up code is in the fragment of the address, which no server
// sees; the script removes it from the address immediately.

import { api, component, data, t } from "./core.js";

const HOME = "/admin/";

const code = location.hash.slice(1);
const place = /^\d+$/.test(code) ? location.hash : ""; // of the requested page, such as a conversation
if (code && !place) history.replaceState(null, "", location.pathname + location.search);

// Returns the page that was requested before signing in, or the home page if the address is not one of the dashboard's.
function wanted() {
  const next = new URLSearchParams(location.search).get("next") ?? HOME;
  return /^\/admin\/(?!api\/)[\w\-.~/%@+:!$&'()*,;=?]*$/.test(next) ? next + place : HOME;
}

// Shared by both forms: one call at a time; a problem is shown next to its field.
const form = (path, body, next = wanted) => ({
  password: "",
  problem: "",
  field: "password", // the field that has the problem
  isShown: false,
  isBusy: false,

  init() {
    this.$nextTick(() => document.getElementById(this.asksForCode ? "code" : "password").focus());
  },

  get kind() {
    return this.isShown ? "text" : "password";
  },

  get isPasswordWrong() {
    return String(Boolean(this.problem) && this.field === "password");
  },

  get isCodeWrong() {
    return String(Boolean(this.problem) && this.field === "code");
  },

  refuse(field, problem) {
    Object.assign(this, { field, problem, isBusy: false });
    if (field === "code") this.asksForCode = true;
    this.$nextTick(() => document.getElementById(field).focus());
  },

  async submit() {
    const mistake = this.check?.();
    if (mistake) this.refuse(...mistake);
    if (mistake || this.isBusy) return;
    this.problem = "";
    this.isBusy = true;
    try {
      await api("POST", path, body(this));
      location.replace(next());
    } catch (error) {
      this.refuse(error.code === "invalid_setup_code" ? "code" : "password", words(error));
    }
  },
});

// Extends an object without calling its getters.
const extended = (base, more) => Object.defineProperties(base, Object.getOwnPropertyDescriptors(more));

const WORDS = {
  wrong_password: () => t("login.wrong"),
  too_many_attempts: () => t("login.too_many"),
  invalid_setup_code: () => t("setup.invalid_code", { minutes: data.minutes }),
  unknown_url: () => t("setup.gone"),
  password_short: () => t("setup.short", { characters: data.characters }),
  password_obvious: () => t("setup.obvious"),
};
const words = (error) => WORDS[error.code]?.() ?? error.message;

component("login", () => form("/admin/api/login", ({ password }) => ({ password })));

component("setup", () =>
  extended(
    form("/admin/api/setup", ({ password, code: typed }) => ({
      password,
      token: typed.slice(typed.indexOf("#") + 1).trim(),
    }), () => "/admin/welcome"),
    {
      code,
      asksForCode: !code,

      get hidesCode() {
        return !this.asksForCode;
      },

      check() {
        if (!this.code.trim()) return ["code", t("setup.no_code")];
        const isShort = [...this.password].length < data.characters;
        return isShort ? ["password", t("setup.short", { characters: data.characters })] : null;
      },
    },
  ),
);

// The page at a one-time address: it signs in without a form.
component("enter", () => ({
  problem: "",

  async init() {
    try {
      const { to } = await api("POST", "/admin/api/enter", { code });
      location.replace(to);
    } catch (error) {
      this.problem = words(error);
    }
  },
}));
