"""From tokens to an answer: text, reasoning and tool calls apart, stop strings found, arguments repaired."""
