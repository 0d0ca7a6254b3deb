"""The task of each agent, to correct a misspelt word in a file, and the templates with which it must succeed."""

WRONG, RIGHT = "wrold", "world"
TASK = f"Replace {WRONG} by {RIGHT} in"
QWEN = "Qwen3.5-4B"
"""Template that refuses a system message after the first message, and opens the reasoning of its answers."""
MISTRAL = "Mistral-Small-3.2-24B-Instruct-2506"
"""Template that requires alternating user and assistant messages, and call ids of nine letters and digits."""
GPT_OSS = "openai-gpt-oss-120b"
"""Template that reads one system or developer message, and writes in channels."""
TEMPLATES = ("demo", QWEN, MISTRAL, GPT_OSS)
