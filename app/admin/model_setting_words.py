"""The words of the form with one model's settings: for each its name and what it is, by section."""

from collections.abc import Mapping

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model_settings.replies", (
        "system_prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens",
        "repetition_penalty", "presence_penalty", "frequency_penalty",
    )),
    ("model_settings.memory", ("alias", "pinned", "idle_seconds")),
    ("model_settings.drafting", (
        "drafts", "methods", "num_draft_tokens", "policy", "acceptance", "prompt_lookup_min", "prompt_lookup_max",
    )),
)  # fmt: skip
WORDS: Mapping[str, tuple[str, str]] = {
    "system_prompt": ("model_settings.system_prompt", "model_settings.system_prompt_about"),
    "temperature": ("model_settings.temperature", "model_settings.temperature_about"),
    "top_p": ("model_settings.top_p", "model_settings.top_p_about"),
    "top_k": ("model_settings.top_k", "model_settings.top_k_about"),
    "min_p": ("model_settings.min_p", "model_settings.min_p_about"),
    "max_tokens": ("model_settings.max_tokens", "model_settings.max_tokens_about"),
    "repetition_penalty": ("model_settings.repetition_penalty", "model_settings.repetition_penalty_about"),
    "presence_penalty": ("model_settings.presence_penalty", "model_settings.presence_penalty_about"),
    "frequency_penalty": ("model_settings.frequency_penalty", "model_settings.frequency_penalty_about"),
    "alias": ("model_settings.alias", "model_settings.alias_about"),
    "pinned": ("model_settings.pinned", "model_settings.pinned_about"),
    "idle_seconds": ("model_settings.idle_seconds", "model_settings.idle_seconds_about"),
    "drafts": ("model_settings.drafts", "model_settings.drafts_about"),
    "methods": ("model_settings.methods", "model_settings.methods_about"),
    "num_draft_tokens": ("model_settings.num_draft_tokens", "model_settings.num_draft_tokens_about"),
    "policy": ("model_settings.policy", "model_settings.policy_about"),
    "acceptance": ("model_settings.acceptance", "model_settings.acceptance_about"),
    "prompt_lookup_min": ("model_settings.prompt_lookup_min", "model_settings.prompt_lookup_min_about"),
    "prompt_lookup_max": ("model_settings.prompt_lookup_max", "model_settings.prompt_lookup_max_about"),
}
