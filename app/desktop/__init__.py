"""Paceline on the desktop: the menu bar, the app and the window; all communicate with the server over HTTP."""
