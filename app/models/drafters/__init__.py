"""Drafters on disk: the methods, their checkpoint formats, and the checks of a drafter's config and tensors."""
