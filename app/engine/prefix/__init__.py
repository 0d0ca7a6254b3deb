"""Prefix cache: computed prompts and answers, in memory and on disk, for later prompts with the same prefix."""
