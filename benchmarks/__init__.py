"""The comparison of cloudckpt with other writers: `python -m benchmarks` (see `benchmarks/README.md`).

Workers import this package with each rival's own interpreter, which has torch and that rival.
"""
