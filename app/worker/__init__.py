"""The worker process: its MLX loop, the loaded models, and text processes beside them. Never imports the server."""
