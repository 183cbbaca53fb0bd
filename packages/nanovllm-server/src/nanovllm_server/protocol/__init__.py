"""The types of the API: requests, responses and errors, and their conversion from and to JSON."""
