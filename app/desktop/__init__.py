"""Paceline on the desktop: the menu bar, the app and the window; all of it speaks HTTP to the server."""
