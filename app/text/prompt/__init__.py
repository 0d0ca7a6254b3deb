"""From a conversation to a prompt: templates, repairs of what they refuse, and thinking settings."""
