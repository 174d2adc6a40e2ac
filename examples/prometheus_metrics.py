"""Metrics of checkpoints for Prometheus, at an HTTP endpoint of the training process.

    pip install prometheus-client
    python examples/prometheus_metrics.py s3://bucket/run --port 9464      (or gs://…, or a path)
    curl http://127.0.0.1:9464/metrics

`CheckpointMetrics` is what to copy; the rest is a training loop to see it work. The alerts that go with it are in
docs/telemetry.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.request
import uuid

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

import cloudckpt

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class CheckpointMetrics:
    """For `cloudckpt.telemetry.subscribe`. Called from many threads: prometheus_client's values are made for that."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._operations = Histogram(
            "cloudckpt_operation_seconds",
            "Saves and loads by how they ended",
            ["operation", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter("cloudckpt_bytes", "Bytes sent and read, as they move", ["direction"], registry=registry)
        self._retries = Counter("cloudckpt_retries", "Requests made again", ["error"], registry=registry)
        self._counters = {
            "hedge": Counter("cloudckpt_hedges", "Requests made twice", registry=registry),
            "load.skipped": Counter("cloudckpt_skipped", "Checkpoints that load_latest passed over", registry=registry),
            "save.tolerated": Counter(
                "cloudckpt_tolerated", "Failed saves that did not end training", registry=registry
            ),
        }
        self._outcomes = {
            "drain": Counter("cloudckpt_drains", "Copies from the fast place", ["outcome"], registry=registry),
            "retention": Counter("cloudckpt_removals", "Removals by retention", ["outcome"], registry=registry),
        }
        self._in_flight = Gauge("cloudckpt_in_flight", "Saves and loads under way", ["operation"], registry=registry)
        self._last = {
            "save.done": Gauge(
                "cloudckpt_last_save_timestamp_seconds", "Time of the last commit, in any place", registry=registry
            ),
            "drain.committed": Gauge(
                "cloudckpt_last_drain_timestamp_seconds", "Time of the last copy to the root", registry=registry
            ),
        }
        # Until the first commit, the age counts from the start: a job that never saves has to be noticed as well.
        for gauge in self._last.values():
            gauge.set_to_current_time()

    def __call__(self, event: cloudckpt.Event) -> None:
        """One event."""
        operation, _, step = event.name.partition(".")
        if event.name == "save.part_uploaded":
            self._bytes.labels("sent").inc(event.num_bytes)
        elif event.name == "load.range_read":
            self._bytes.labels("read").inc(event.num_bytes)
        elif event.name == "retry":
            self._retries.labels(event.error).inc()
        elif event.name in self._counters:
            self._counters[event.name].inc()
        elif operation in self._outcomes:
            self._outcomes[operation].labels(step).inc()
        elif step == "begun":
            self._in_flight.labels(operation).inc()
        elif operation in ("save", "load") and step in ("done", "failed", "cancelled"):
            self._in_flight.labels(operation).dec()
            self._operations.labels(operation, step).observe(event.seconds)
        if event.name in self._last:
            self._last[event.name].set_to_current_time()


def main() -> None:
    """Save a few times, and print what Prometheus would see."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", help="where to save: a new folder is made below it")
    parser.add_argument("--port", type=int, default=0, help="of the endpoint; 0 takes any that is free")
    parser.add_argument("--num-saves", type=int, default=3)
    args = parser.parse_args()
    registry = CollectorRegistry()
    cloudckpt.telemetry.subscribe(CheckpointMetrics(registry))
    server, thread = start_http_server(args.port, addr="127.0.0.1", registry=registry)
    root = f"{args.uri}/{uuid.uuid4().hex[:8]}"
    model = torch.nn.Linear(512, 512)
    for step in range(args.num_saves):
        cloudckpt.async_save({"model": model.state_dict()}, f"{root}/step-{step}", no_dist=True).result()
    cloudckpt.load_latest({"model": model.state_dict()}, root, no_dist=True)
    address = f"http://127.0.0.1:{server.server_port}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:  # of this process
        print(answer.read().decode())
    server.shutdown()
    server.server_close()
    thread.join()
    cloudckpt.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
