"""One save or load on one rank: wires planning, staging, transfer and commit together.

Takes plans and planners of one rank. Gives objects on a store, filled tensors, and reports. Called by `dcp`, `convert`
and `inspect`.
"""
