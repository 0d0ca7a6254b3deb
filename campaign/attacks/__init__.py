"""The attacks, a family a file; `campaign/__main__.py` lists them."""
