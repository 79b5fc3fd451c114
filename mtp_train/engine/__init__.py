"""Inference backends: what generates, prefills and speculates, one file per engine."""
