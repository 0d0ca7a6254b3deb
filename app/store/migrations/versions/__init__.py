"""The steps. A file that was released never changes; another change of the tables is another file."""
