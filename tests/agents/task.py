"""The task that each agent is given, a word that is wrong in a file, and the templates on which it has to manage."""

WRONG, RIGHT = "wrold", "world"
TASK = f"Replace {WRONG} by {RIGHT} in"
QWEN = "Qwen3.5-4B"
"""It refuses a system message that is not the first, and opens the reasoning of its answers."""
MISTRAL = "Mistral-Small-3.2-24B-Instruct-2506"
"""It wants users and assistants in turns, and calls with ids of nine letters and digits."""
GPT_OSS = "openai-gpt-oss-120b"
"""It reads one system or developer message, and writes in channels."""
TEMPLATES = ("demo", QWEN, MISTRAL, GPT_OSS)
