"""Decides how many tokens of each request the next step computes."""
