"""What heads and engines are built from where transformers has no layer for it."""
