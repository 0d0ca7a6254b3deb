"""Coding agents as their makers publish them: `python -m tests.agents.installed` fetches them (1 GB, Linux on x64)."""

import sys
from pathlib import Path

from tests.published import fetch_locked

FOLDER = Path(sys.prefix) / "agents"
PACKAGES = FOLDER / "node_modules"
CODEX = PACKAGES / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin"
FOLDERS = {
    "claude": PACKAGES / "@anthropic-ai/claude-code-linux-x64",
    "codex": CODEX,
    "opencode": PACKAGES / "opencode-linux-x64/bin",
    "aider": Path(sys.prefix) / "clients/bin",
}
"""Folder of each agent's program, by agent: the binary itself, not the script that would choose among binaries."""

if __name__ == "__main__":
    fetch_locked(FOLDER, Path(__file__).parent)
