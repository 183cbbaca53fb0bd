"""The command `interference`: how long prompts, short requests, decoding streams and chat turns delay each other."""
