"""Which requests compute how many tokens in the next step."""
