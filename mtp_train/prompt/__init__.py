"""From a data set's rows to prompts, and through the target's chat template to token ids with a loss mask."""
