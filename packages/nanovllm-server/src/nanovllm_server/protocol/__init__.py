"""Defines the API's requests, responses and errors, and converts them from and to JSON."""
