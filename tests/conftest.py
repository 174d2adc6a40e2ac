"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Derandomised: a failure on one machine is a failure on all. No deadline: a loaded machine is not a defect.
settings.register_profile(
    "cloudckpt",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("cloudckpt")
