"""Text on both sides of the model: prompts, answers, grammars, and shared knowledge of tokenizers. Never uses mlx."""
