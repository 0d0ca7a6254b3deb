"""KV caches and recurrent states of the sequences: their layout, rollback, and attention over them."""
