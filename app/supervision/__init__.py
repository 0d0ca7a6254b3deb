"""The worker as the server sees it: one process kept alive, and its requests as asyncio streams. Never imports mlx."""
