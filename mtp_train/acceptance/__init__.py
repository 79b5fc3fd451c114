"""How much of a draft the target takes: the exact rule, the counts, the estimate without decoding, reports."""
