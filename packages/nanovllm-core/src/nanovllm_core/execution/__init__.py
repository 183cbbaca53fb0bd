"""Carries plans out on one device."""
