"""One chat completion: from a parsed request to the deltas of its answer."""
