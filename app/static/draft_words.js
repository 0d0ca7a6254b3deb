// Words of the draft picker for one candidate.

import { ago, bytes, number, percent, t } from "./core.js";
import { aboutTimes, cacheTitle, cacheWords, memoryWords, methodWords, times } from "./model_words.js";
import { range } from "./pays_words.js";
import { reasonWords } from "./reason_words.js";

const TOKENS = {
  same: { tone: "good", words: () => t("drafts.tokens_same") },
  borrowed: { tone: "good", words: () => t("drafts.tokens_borrowed") },
  unneeded: { tone: "", words: () => t("drafts.tokens_unneeded") },
  other: { tone: "bad", words: () => t("drafts.tokens_other") },
  unknown: { tone: "", words: () => t("drafts.tokens_unknown") },
};
const ORIGINS = { checkpoint: () => t("drafts.inside"), text: (method) => methodWords(method) };

// The share of drafted tokens that were accepted since the server started.
function liveWords(counts) {
  if (!counts?.drafted) return "";
  return percent(counts.accepted / counts.drafted);
}

// Words for a candidate's measured gain. Only figures of the latest measurement may be green.
function gain(measured) {
  if (!measured) return { isMeasured: false };
  const isTie = measured.standing === "tie";
  const isOneRound = measured.rounds === 1;
  const ratio = (isOneRound ? aboutTimes : times)(measured.ratio);
  return {
    isMeasured: true,
    gainWords: isTie ? t("drafts.no_difference") : ratio,
    gainTone: isTie ? "tie" : measured.standing === "faster" && measured.is_latest ? "good" : "",
    gainLabel: isTie ? "" : t("drafts.speedup"),
    spreadWords: isOneRound ? t("drafts.first_impression") : range(measured.low, measured.high, (value) => number(value, 2)),
    earlierWords: measured.is_latest ? "" : t("drafts.earlier", { ago: ago(measured.measured_at) }),
    measuredLabel: `${t("drafts.measured")} · ${t.n("drafts.per_step", measured.num_draft_tokens)}`,
    measuredWords: t("drafts.speed", { speed: number(measured.tokens_per_second, 0) }),
    acceptedWords: measured.acceptance === null ? t("core.none") : percent(measured.acceptance),
  };
}

export function candidateRow(candidate, { view, chosen }) {
  const isText = candidate.origin === "text";
  const name = ORIGINS[candidate.origin]?.(candidate.method) ?? candidate.id;
  const alone = view.model.footprint;
  const isCrowded = !candidate.has_room && !isText && alone.fits;
  const tokens = TOKENS[candidate.tokens];
  return {
    ...candidate,
    ...gain(candidate.measured),
    name,
    methodWords: methodWords(candidate.method),
    frame: candidate.in_use ? "used" : "",
    useWords: candidate.in_use ? (view.model.state === "loaded" ? t("drafts.in_use") : t("drafts.is_planned")) : "",
    tokensTone: tokens.tone,
    tokensWords: tokens.words(),
    fitWords: candidate.tokens === "other" ? t("drafts.tokens_other") : t("drafts.no_fit"),
    isUnusual: !candidate.is_usual && !candidate.refusal,
    memoryWords: isText ? t("drafts.no_memory") : bytes(candidate.extra.total_bytes),
    memoryParts: isText ? "" : memoryWords(candidate.extra),
    rollbackWords: isText ? t("drafts.no_rollback") : cacheWords(candidate.rollback),
    rollbackTitle: cacheTitle(candidate.rollback),
    liveWords: liveWords(view.counts[candidate.method]),
    roomWords: isCrowded
      ? t("drafts.no_room", {
          total: bytes(alone.total_bytes + candidate.extra.total_bytes),
          ceiling: bytes(view.ceiling_bytes),
        })
      : "",
    unavailableWords: reasonWords(candidate.unavailable),
    isChosen: chosen[candidate.method] === candidate.id,
    cannotChoose: !candidate.has_room,
    canAttach: !isText && candidate.has_room,
    chooseWords: t("drafts.choose_named", { name }),
    attachWords: t("drafts.attach_named", { name }),
  };
}

export function offerRow(offer, download) {
  const isComing = ["queued", "running", "paused"].includes(download?.state);
  return {
    ...offer,
    name: offer.repository || t("drafts.inside"),
    methodWords: methodWords(offer.method),
    sizeWords: offer.size_bytes ? t("drafts.about", { size: bytes(offer.size_bytes) }) : "",
    canDownload: Boolean(offer.repository),
    hint: offer.repository ? "" : t("drafts.inside_original"),
    roomWords: offer.has_room ? "" : t("drafts.no_room_published"),
    isComing,
    fraction: download?.total_bytes ? download.done_bytes / download.total_bytes : 0,
    actionWords: isComing ? t("drafts.coming") : t("drafts.download"),
    actionLabel: t("drafts.download_named", { name: offer.repository }),
  };
}
