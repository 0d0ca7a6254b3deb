"""Keys, values and states of the sequences: where they lie, how they rewind, and attention over them."""
