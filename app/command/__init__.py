"""The `paceline` command, one file per noun. It talks to a running server over HTTP and never imports mlx."""
