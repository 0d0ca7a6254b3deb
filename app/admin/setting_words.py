"""The words of the settings page: a name and an explanation for each setting, its options, the titles of sections."""

from collections.abc import Mapping

WORDS: Mapping[str, tuple[str, str]] = {
    "language": ("settings.language", "settings.language_about"),
    "theme": ("settings.theme", "settings.theme_about"),
    "open": ("settings.open", "settings.open_about"),
    "default_model": ("settings.default_model", "settings.default_model_about"),
    "host": ("settings.host", "settings.host_about"),
    "port": ("settings.port", "settings.port_about"),
    "allowed_hosts": ("settings.allowed_hosts", "settings.allowed_hosts_about"),
    "allowed_origins": ("settings.allowed_origins", "settings.allowed_origins_about"),
    "api_key": ("settings.api_key", "settings.api_key_about"),
    "require_key": ("settings.require_key", "settings.require_key_about"),
    "max_requests": ("settings.max_requests", "settings.max_requests_about"),
    "drain_seconds": ("settings.drain_seconds", "settings.drain_seconds_about"),
    "memory_limit": ("settings.memory_limit", "settings.memory_limit_about"),
    "idle_seconds": ("settings.idle_seconds", "settings.idle_seconds_about"),
    "max_rows": ("settings.max_rows", "settings.max_rows_about"),
    "queue_limit": ("settings.queue_limit", "settings.queue_limit_about"),
    "home": ("settings.home", "settings.home_about"),
    "model_dirs": ("settings.model_dirs", "settings.model_dirs_about"),
    "downloads_folder": ("settings.downloads_folder", "settings.downloads_folder_about"),
    "hub_endpoint": ("settings.hub_endpoint", "settings.hub_endpoint_about"),
    "parallel_downloads": ("settings.parallel_downloads", "settings.parallel_downloads_about"),
    "policy": ("settings.policy", "settings.policy_about"),
    "acceptance": ("settings.acceptance", "settings.acceptance_about"),
    "num_draft_tokens": ("settings.num_draft_tokens", "settings.num_draft_tokens_about"),
    "drafts": ("settings.drafts", "settings.drafts_about"),
    "speculative_config": ("settings.speculative_config", "settings.speculative_config_about"),
    "history_limit": ("settings.history_limit", "settings.history_limit_about"),
    "ngram_across_requests": ("settings.ngram_across_requests", "settings.ngram_across_requests_about"),
    "keep_texts": ("settings.keep_texts", "settings.keep_texts_about"),
    "log_level": ("settings.log_level", "settings.log_level_about"),
}
SECTION_WORDS: Mapping[str, str] = {
    "general": "settings.section_general",
    "network": "settings.section_network",
    "memory": "settings.section_memory",
    "folders": "settings.section_folders",
    "speculation": "settings.section_speculation",
    "history": "settings.section_history",
}
FELT_WORDS: Mapping[str, str] = {
    "now": "settings.felt_now",
    "reload": "settings.felt_reload",
    "restart": "settings.felt_restart",
}
OPTION_WORDS: Mapping[str, Mapping[str, str]] = {
    "theme": {"system": "theme.system", "light": "theme.light", "dark": "theme.dark"},
    "policy": {"single": "drafts.policy_single", "auto": "drafts.policy_auto", "off": "drafts.policy_off"},
    "acceptance": {"coupled": "drafts.coupled", "rejection": "drafts.rejection"},
    "log_level": {
        "debug": "settings.log_debug",
        "info": "logs.from_info",
        "warning": "logs.from_warning",
        "error": "logs.from_error",
    },
}
"""What there is to choose; languages say their own names."""
