"""The cache: the target's hidden states and next-token distributions on disk, written once and read by every training run."""
