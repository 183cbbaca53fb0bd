"""What commands share that measure cases on several servers: flags, texts, a client, results and tables."""
