"""Manage the checkpoints of one run: save them when they are due, restore the newest, remove superseded ones.

Input: a root URI and state dicts. Output: checkpoints at ``<root>/step-<n>``. Called by
`cloudckpt.integrations` and users; calls `cloudckpt.api`, `cloudckpt.inspect` and `cloudckpt.commit`.
"""
