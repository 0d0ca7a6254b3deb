"""Everything that touches a tensor: one loaded model, its caches, drafters and acceptance. One thread calls it."""
