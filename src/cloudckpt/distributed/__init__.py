"""Collectives that end in bounded time, whatever becomes of a rank.

`cloudckpt.api` and `cloudckpt.manager` call `guarded_collectives`.
"""
