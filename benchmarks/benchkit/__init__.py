"""What `benchmarks/run.py` is made of: systems to compare, worker processes that run them, and tables."""
