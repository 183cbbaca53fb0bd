"""What an operator sees: logs, metrics, and one line for every HTTP exchange."""
