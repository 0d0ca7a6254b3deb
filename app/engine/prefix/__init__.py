"""The prefix cache: what is kept of prompts and answers, in memory and on disk, for prompts that begin alike."""
