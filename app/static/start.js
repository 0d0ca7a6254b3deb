// The start page: copy buttons everywhere; what is live and the prompt only where no key is needed.

import { watch } from "./live.js";
import { byId, data, t } from "./page.js";
import { listenToPrompt, offerModels, showLoading } from "./reply.js";

const SAY_MS = 1600;

async function copy(button) {
  const source = byId(button.dataset.copy);
  let said = t("copy.done");
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    getSelection().selectAllChildren(source);
    said = t("copy.selected");
  }
  button.textContent = said;
  setTimeout(() => (button.textContent = t("copy.button")), SAY_MS);
}

for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
if (data.live) {
  listenToPrompt();
  watch({ onState: (state) => showLoading(state.loading), onModels: offerModels });
}
