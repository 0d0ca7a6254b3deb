// What the server is doing: its state, what is in memory, what is on disk. Asks again and again while it is looked at.

import { byId, bytes, make, number, percent, show, t } from "./page.js";

const REFRESH_MS = 1500;
const MODELS_EVERY_MS = 15000;

function showStatus(tone, words, device = "") {
  byId("status").dataset.tone = tone;
  show(byId("status-text"), words, () => [words]);
  show(byId("device"), device, () => [device]);
}

function showWorker(state) {
  const device = state.worker.info?.device ?? "";
  if (state.draining) showStatus("busy", t("status.draining"), device);
  else if (state.worker.ready) showStatus("good", t("status.ready"), device);
  else showStatus("busy", state.worker.restarts ? t("status.restarting") : t("status.starting"), device);
  const ceiling = state.worker.info?.memory_ceiling_bytes ?? 0;
  byId("memory").hidden = !ceiling || !state.models.length;
  byId("meter").max = ceiling || 1;
  byId("meter").value = state.active_bytes;
  byId("memory-text").textContent = t("live.memory", { used: bytes(state.active_bytes), ceiling: bytes(ceiling) });
}

const badge = (words, tone = "") => make("span", `badge ${tone}`, words);

function loadingCard(name, progress) {
  const bar = make("progress");
  bar.value = progress.fraction;
  const words = `${t("live.loading")} ${percent(progress.fraction)}`;
  bar.setAttribute("aria-label", words);
  return make("article", "model", make("h3", "", name), badge(words, "busy"), bar);
}

const namesOf = (drafts) => drafts.map((draft) => draft.id).join(" + ");

function modelCard(model) {
  const states = { ready: t("live.ready"), loading: t("live.loading"), unloading: t("live.unloading") };
  const used = model.weights_bytes + model.cache_bytes + model.prefix_cache_bytes;
  const draft = model.drafts.length ? t("live.draft", { draft: namesOf(model.drafts) }) : t("live.alone");
  const badges = make("p", "badges", badge(states[model.state] ?? model.state, model.state === "ready" ? "good" : "busy"));
  if (model.pinned) badges.append(badge(t("live.pinned")));
  badges.append(badge(t("live.running", { count: number(model.running) }), model.running ? "good" : ""));
  badges.append(badge(t("live.waiting", { count: number(model.waiting) }), model.waiting ? "busy" : ""));
  const card = make("article", "model", make("h3", "", model.id), make("p", "soft small", `${draft} · ${bytes(used)}`), badges);
  if (model.methods.length) {
    const names = model.methods.map((method) => make("code", "", method));
    card.append(make("p", "methods small", make("span", "soft", t("live.methods")), ...names));
  }
  const reasons = Object.entries(model.unavailable);
  if (reasons.length) {
    const rows = reasons.map(([method, why]) => make("li", "", make("code", "", method), ` ${why}`));
    card.append(make("div", "reasons small", make("span", "soft", t("live.unavailable")), make("ul", "", ...rows)));
  }
  return card;
}

function showLoaded(state) {
  const loading = Object.entries(state.loading);
  const names = new Set(loading.map(([name]) => name));
  const models = state.models.filter((model) => !names.has(model.id));
  const quarantined = Object.entries(state.quarantined);
  const timeless = models.map((model) => ({ ...model, idle_seconds: 0 }));
  show(byId("loaded"), [loading, timeless, quarantined], () => {
    const cards = [
      ...loading.map(([name, progress]) => loadingCard(name, progress)),
      ...models.map(modelCard),
      ...quarantined.map(([name, why]) =>
        make("article", "model", make("h3", "", name), badge(t("live.quarantined"), "bad"), make("p", "small", why))),
    ];
    return cards.length ? cards : [make("p", "soft", t("live.empty"))];
  });
}

// --- what is on disk ---------------------------------------------------------------------------------------------

function diskRow(model) {
  const states = {
    available: t("disk.available"), loaded: t("disk.loaded"), loading: t("disk.loading"),
    unloading: t("disk.unloading"), unusable: t("disk.unusable"),
  };
  const tones = { loaded: "good", loading: "busy", unloading: "busy", unusable: "bad" };
  const name = make("th", "", model.id);
  name.scope = "row";
  if (model.problem) name.append(make("p", "problem small", model.problem));
  const cell = (label, child) => {
    const node = make("td", "", child);
    node.dataset.label = label;
    return node;
  };
  const alone = model.kind === "drafter" ? t("disk.drafter") : t("disk.unknown");
  return make("tr", "", name,
    cell(t("disk.size"), model.size_bytes ? bytes(model.size_bytes) : t("disk.unknown")),
    cell(t("disk.context"), model.context ? t("disk.tokens", { count: number(model.context) }) : t("disk.unknown")),
    cell(t("disk.draft"), model.drafts.length ? namesOf(model.drafts) : alone),
    cell(t("disk.state"), badge(states[model.state] ?? model.state, tones[model.state] ?? "")));
}

function showDisk(models) {
  show(byId("disk"), models, () => models.map(diskRow));
  byId("disk").parentElement.hidden = !models.length;
  byId("disk-empty").hidden = models.length > 0;
  byId("disk-count").textContent = models.length ? t("disk.count", { count: number(models.length) }) : "";
}

// --- refreshing --------------------------------------------------------------------------------------------------

async function get(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(8000), cache: "no-store" });
  if (!response.ok) throw new Error(response.statusText);
  return response.json();
}

let modelsSeen = "";
let modelsAt = -Infinity;
export async function watch(heard) {
  try {
    if (!document.hidden) {
      const state = await get("/api/ps");
      showWorker(state);
      showLoaded(state);
      heard.onState(state);
      const seen = JSON.stringify([state.models.map((model) => [model.id, model.state]), Object.keys(state.quarantined)]);
      if (seen !== modelsSeen || performance.now() - modelsAt > MODELS_EVERY_MS) {
        const models = (await get("/v1/models")).data;
        showDisk(models);
        heard.onModels(models);
        [modelsSeen, modelsAt] = [seen, performance.now()];
      }
    }
  } catch {
    showStatus("bad", t("status.gone"));
  }
  setTimeout(watch, REFRESH_MS, heard);
}
