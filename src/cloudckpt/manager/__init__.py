"""Manage the checkpoints of one run: save them when they are due, restore the newest, remove superseded ones.

Input: a root URI and state dicts. Output: checkpoints at ``<root>/step-<n>``, or first in a fast place. Called by
`cloudckpt.cli`, `cloudckpt.integrations` and users; calls `cloudckpt.api`, `cloudckpt.convert`, `cloudckpt.inspect` and
`cloudckpt.commit`.
"""
