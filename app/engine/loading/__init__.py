"""From a folder to a running engine: which units are in memory, their weights, drafters, limits and warm-up."""
