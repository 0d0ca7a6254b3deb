"""Limits on what an answer may be: schemas and grammars as masks over tokens, and the text that they force."""
