"""mtp-train: train MTP and EAGLE draft heads for speculative decoding, and measure them where they will run."""

__version__ = "0.1.0"
