"""Text on both sides of the model: prompts, answers and grammars, with what all three know of tokenizers. Never mlx."""
