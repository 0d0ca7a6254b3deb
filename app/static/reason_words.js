// Why something is as it is: a code and values of the server in words. What has no code is from an earlier version, in its own words.

import { number, percent, seconds, t } from "./core.js";
import { methodWords } from "./model_words.js";

const WORDS = {
  asked: () => t("reason.asked"),
  policy_off: () => t("reason.policy_off"),
  batched: () => t("reason.batched"),
  drafters: (values) => t("reason.drafters", values),
  no_drafter: () => t("reason.no_drafter"),
  measuring: () => t("reason.measuring"),
  plain: (values) => t("reason.plain", values),
  no_match: () => t("reason.no_match"),
  last_token: () => t("reason.last_token"),
  under_way: () => t("reason.under_way"),
  strict_first: () => t("reason.strict_first"),
  slow_masks: () => t("reason.slow_masks"),
  drafter_full: () => t("reason.drafter_full"),
  drafter_unread: () => t("reason.drafter_unread"),
  drafter_waits: () => t("reason.drafter_waits"),
  not_chosen: (values) => t("reason.not_chosen", values),
  not_loaded: () => t("reason.not_loaded"),
  cannot_draft: (values) => t("reason.cannot_draft", values),
  exit_killed: () => t("reason.exit_killed"),
  exit_aborted: () => t("reason.exit_aborted"),
  exit_segfault: () => t("reason.exit_segfault"),
  exit_bus: () => t("reason.exit_bus"),
  exit_illegal: () => t("reason.exit_illegal"),
  exit_terminated: () => t("reason.exit_terminated"),
  exit_signal: (values) => t("reason.exit_signal", values),
  exit_clean: () => t("reason.exit_clean"),
  exit_code: (values) => t("reason.exit_code", values),
  exit_stuck: () => t("reason.exit_stuck"),
  exit_not_started: (values) => t("reason.exit_not_started", values),
  exit_not_ready: (values) => t("reason.exit_not_ready", values),
  exit_hung: (values) => t("reason.exit_hung", values),
  exit_channel: (values) => t("reason.exit_channel", values),
  exit_unwatched: (values) => t("reason.exit_unwatched", values),
  exit_stopped: (values) => t("reason.exit_stopped", values),
  exit_restarted: (values) => t("reason.exit_restarted", values),
  quarantined: (values) => t("reason.quarantined", values),
};
const methodsWords = (names) => names.split(", ").map(methodWords).join(", ");
const SHOWN = { method: methodWords, methods: methodsWords, share: percent, seconds, ratio: (value) => number(value, 1) };
const shown = ([name, value]) => [name, SHOWN[name]?.(value) ?? (typeof value === "number" ? number(value) : value)];

export const reasonWords = ({ reason, reason_code: code, reason_values: values }) =>
  WORDS[code]?.(Object.fromEntries(Object.entries(values ?? {}).map(shown))) ?? reason ?? "";
