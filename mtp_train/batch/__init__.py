"""From cached samples to packed batches: alignment, packing, loading."""
