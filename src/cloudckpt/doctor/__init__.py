"""What stands between a place and a save: credentials, permissions, promises that a store does not keep, slowness."""

from cloudckpt.doctor.examine import examine
from cloudckpt.doctor.model import Check, Examination, Outcome

__all__ = ["Check", "Examination", "Outcome", "examine"]
