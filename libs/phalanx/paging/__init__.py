"""Values that are too many for memory, in pages of a file on a local disk."""
