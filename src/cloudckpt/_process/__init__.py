"""Uploading in a process of its own, beside a training loop that needs the interpreter to itself."""
