"""Find out if saves to a place and loads from it will work: credentials, clock, bucket, permissions, promises.

Takes a URI and `Options`, and returns a `DoctorReport`. Called by the command line and by users.
"""

from cloudckpt.doctor.examination import Check, DoctorReport, Outcome, examine

__all__ = ["Check", "DoctorReport", "Outcome", "examine"]
