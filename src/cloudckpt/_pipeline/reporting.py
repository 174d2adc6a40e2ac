"""What a load did, in a report."""

from __future__ import annotations

from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.load import Loaded
from cloudckpt.report import LoadReport


def report_of(
    loaded: Loaded,
    context: Context,
    *,
    attempt: str,
    plan_s: float,
    manifest_s: float,
    read_s: float,
    transfer_s: float,
    stage_s: float,
) -> LoadReport:
    """What this rank did."""
    return LoadReport(
        uri=context.uri,
        attempt=attempt,
        rank=context.rank,
        num_bytes_wanted=loaded.num_bytes_wanted,
        num_bytes_read=loaded.num_bytes_read,
        num_bytes_received=loaded.num_bytes_received,
        num_requests=context.retrier.num_requests + context.hedger.num_hedges,
        num_retries=context.retrier.num_retries,
        num_hedges=context.hedger.num_hedges,
        plan_s=plan_s,
        manifest_s=manifest_s,
        read_s=read_s,
        transfer_s=transfer_s,
        stage_s=stage_s,
    )
