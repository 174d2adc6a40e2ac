"""Move bytes between memory and a store: planned reads, parallel uploads, retries, hedged requests, checksums.

Planning is pure; executors take plans and a store. `pipeline`, `commit` and `convert` call this package.
"""
