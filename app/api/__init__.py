"""Endpoints in the formats of OpenAI, Anthropic, Ollama and others; they reach the worker via `app.supervision`."""
