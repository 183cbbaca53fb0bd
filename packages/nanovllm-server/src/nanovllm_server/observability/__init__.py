"""Logs, metrics, and the log line of every HTTP exchange."""
