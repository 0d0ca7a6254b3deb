"""The worker process: its MLX loop, the loaded models and their text processes. Never imports the server."""
