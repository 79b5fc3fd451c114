"""Draft heads: one architecture per file, named as its yaml in conf/head."""
