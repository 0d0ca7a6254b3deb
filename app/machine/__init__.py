"""This computer: its memory and chip, its processes, the channel between two of them, and our own files on it."""
