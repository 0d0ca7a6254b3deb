"""`paceline bench`: our engine and mlx-lm's, side by side in one run.

It runs in its own process, so it may import mlx, the engine and the scheduler; nothing but the command line imports it.
"""
