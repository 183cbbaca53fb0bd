"""Executes the scheduler's step plans on one device."""
