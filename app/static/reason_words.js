// Words for a reason, from its code and values. A reason without a code is an earlier version's text, shown as it is.

import { number, percent, seconds, t } from "./core.js";
import { methodWords } from "./model_words.js";

const methodsWords = (names) => names.split(", ").map(methodWords).join(", ");
const SHOWN = { method: methodWords, methods: methodsWords, share: percent, seconds, ratio: (value) => number(value, 1) };
const shown = ([name, value]) => [name, SHOWN[name]?.(value) ?? (typeof value === "number" ? number(value) : value)];

export const reasonWords = ({ reason, reason_code: code, reason_values: values }) =>
  t.or(`reason.${code}`, reason ?? "", Object.fromEntries(Object.entries(values ?? {}).map(shown)));
