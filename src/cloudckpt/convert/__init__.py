"""Copy checkpoints between stores, merge them, export them to other formats, and import those.

Takes URIs and `Options`; returns reports. The public package, the command line, drains of a manager and
publications call it. See ``docs/design/023-copies-and-exports.md``.
"""
