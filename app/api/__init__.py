"""The OpenAI-compatible endpoints: one file each; this layer sees the worker only through `serving.ports`."""
