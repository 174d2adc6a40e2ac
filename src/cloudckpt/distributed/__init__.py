"""The rendezvous of ranks in bounded time. `cloudckpt.dcp.collectives` makes its collectives behind it."""
