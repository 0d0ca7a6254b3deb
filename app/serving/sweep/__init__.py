"""Measurements of one model and their evaluation: shared by `paceline bench` and the dashboard."""
