"""Tables of modules."""
