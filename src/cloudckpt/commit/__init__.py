"""The commit protocol on a store: read the log, put a manifest, put fences, remove garbage.

Takes manifests, and gives the current one. `pipeline`, `inspect` and `manager` call this package.
"""
