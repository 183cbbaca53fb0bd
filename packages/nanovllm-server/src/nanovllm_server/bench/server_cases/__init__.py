"""Code of all commands that measure cases on several servers: flags, texts, a client, results and tables."""
