"""Measurements that ship with the repository but not with the app."""
