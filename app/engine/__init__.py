"""All code that touches tensors: loading, forwards, caches, drafters and acceptance. A single thread calls it."""
