"""What a head is trained on: one loss per file, named as its yaml in conf/loss."""
