"""Paceline: local inference for Apple silicon, a main model drafted by a cheap one."""

__version__ = "0.1.0"
