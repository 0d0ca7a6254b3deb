"""Our engine and mlx-lm's, side by side in one run: `python -m bench.comparison --help`."""

from app.engine.platform import prepare

NOTE = prepare().reason
"""What serves the matmuls; said before anything imports mlx."""
