"""Heads that others have published: which tensors their layouts hold, and what ours are called."""
