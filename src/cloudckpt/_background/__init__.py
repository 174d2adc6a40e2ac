"""Saves beside training, and what they need of their own."""
