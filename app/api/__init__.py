"""Endpoints of OpenAI, Anthropic and Ollama, one file each; they reach the worker through `app.supervision` only."""
