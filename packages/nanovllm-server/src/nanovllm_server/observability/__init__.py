"""Logs, metrics, counters that workers share, and the log line of every HTTP exchange."""
