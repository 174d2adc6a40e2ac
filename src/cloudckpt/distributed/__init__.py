"""Collectives that end in bounded time, whatever becomes of a rank.

`cloudckpt.api` and `cloudckpt.manager` call `guarded_collectives`.

`shared_reads` passes bytes that several ranks of a machine want from one of them to the others.
"""
