"""Logs, metrics, shared counters, and the middleware that logs every HTTP exchange."""
