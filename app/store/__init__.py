"""The data that Paceline keeps between starts: one SQLite file in its home folder. No model, no tensor, no HTTP."""
