"""Measurements that ship with the repository and not with the app."""
