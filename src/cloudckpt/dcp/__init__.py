"""torch's distributed checkpointing: writer, reader, planners, and the protocol that drives them on all ranks.

Takes state dicts and process groups. Gives commits, filled tensors, and errors with the causes of each rank. Called by
`api`, `background`, `manager` and by torch's own ``dcp.save`` and ``dcp.load``.
"""
