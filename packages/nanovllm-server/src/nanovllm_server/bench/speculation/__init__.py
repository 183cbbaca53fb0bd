"""The command `speculation`: how fast real text decodes with and without drafts, and whether the answers are equal."""
