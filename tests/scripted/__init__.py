"""Models that say what a test wrote: only the choice of each token is scripted, everything around it is Paceline's.

`server.py` is a real server with a real worker and a model for each template that a test names (`folders.py`). The
model answers with a play (`worker.py`): the text that the test gave to the last `PLAY:NAME` in the prompt.
"""
