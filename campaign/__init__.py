"""Attacks on a running server: `make campaign`; see `campaign/README.md`."""
