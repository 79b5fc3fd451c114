"""From a cache and a head to a trained head: objective, optimizer, state, loop, metrics."""
