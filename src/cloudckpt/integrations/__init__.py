"""Integrations with training frameworks: one module for each framework, and only that module imports it."""
