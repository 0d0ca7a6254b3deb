"""Model folders: their files, values and sizes, the drafters that fit them, and the catalog of all of them.

Everything here reads folders as strangers left them. Standard library and msgspec only; no weights are read.
"""
