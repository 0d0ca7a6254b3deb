"""This computer: its memory and chip, its processes, the channel between server and worker, and Paceline's files."""
