"""How ranks come to nodes: one interface, one module for each way (docs in `base`)."""
