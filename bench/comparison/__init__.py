"""Our engine and mlx-lm's, side by side in one run: `python -m bench.comparison --help`."""

from app.engine.platform import prepare

NOTE = prepare().reason
"""Note on the library that serves the matmuls; `prepare` must run before anything imports mlx."""
