"""Saving trees to files, and loading them."""
