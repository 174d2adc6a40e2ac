"""Copy checkpoints between stores, export them to other formats, and import those.

Takes URIs and `Options`; returns reports. The public package and the command line call it. See
``docs/design/023-copies-and-exports.md``.
"""
