"""This computer: its memory and chip, its processes, and the files that Paceline itself keeps on it."""
