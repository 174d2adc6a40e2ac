"""Versions of a model's weights that are published as differences, and pulled.

`Publisher` saves each version as a checkpoint of its own, and `pull` reads the least that a reader lacks.
"""
