"""Tell subscribers the events of this process's saves and loads, and make OpenTelemetry spans and metrics of them.

A subscriber cannot fail a save or a load. ``docs/telemetry.md`` lists the events, spans and metrics.
"""

from cloudckpt.telemetry.subscribers import instrument, subscribe, uninstrument

__all__ = ["instrument", "subscribe", "uninstrument"]
