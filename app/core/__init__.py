"""Values, ports and errors that every layer shares. Standard library and msgspec only."""
