"""Models that say what a test wrote: only the choice of each token is theirs, everything around it is Paceline's.

`server.py` is a real server with a real worker, a model for each template that a test names (`folders.py`), and plays
(`worker.py`): what the model says for the last `PLAY:NAME` in its prompt.
"""
