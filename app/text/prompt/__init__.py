"""From a conversation to a prompt: templates, repairs of conversations that they refuse, and thinking settings."""
