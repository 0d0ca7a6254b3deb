"""Paceline on the desktop: menu bar, app and window."""
