"""From logits to tokens: the draw, truncation, and the rules that accept drafts."""
