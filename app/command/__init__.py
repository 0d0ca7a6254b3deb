"""The `paceline` command, one file per topic. It talks to a running server over HTTP and never imports mlx."""
