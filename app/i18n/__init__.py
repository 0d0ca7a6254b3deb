"""The texts of the interface, one JSON catalog for each language."""
