"""Writers of what an engine serves: one format per file, named as its yaml in conf/exporter."""
