"""Drafters as files: the methods, their formats, and what a drafter's config and tensors must hold."""
