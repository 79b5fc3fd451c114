"""What must be known of the model that is sped up: sizes, identity, and the weights that a head shares with it."""
