"""List, describe, verify and compare checkpoints, without a model; `catalog` finds the `latest` one.

Takes URIs and `Options`; returns values of `cloudckpt.types`. The public package, the command line, `manager` and
`convert` call it.
"""
