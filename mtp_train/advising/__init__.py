"""Which way of decoding to serve for a workload: from reports' measured acceptance and the costs of a step."""
