"""Fetches cached blocks of prompts from other engines, and serves cached blocks to other engines."""
