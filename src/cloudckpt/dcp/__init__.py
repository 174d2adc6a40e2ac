"""torch's distributed checkpointing: writer, reader, planners, and the protocol that drives them on all ranks.

Takes state dicts and process groups. Gives commits, filled tensors, and errors with the causes of each rank. Called by
`api`, `background`, `manager` and by torch's own ``dcp.save`` and ``dcp.load``.
"""

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

__all__ = ["AsyncCheckpointerType", "AsyncStager", "LoadPlanner", "SavePlanner"]  # arguments of the public functions
