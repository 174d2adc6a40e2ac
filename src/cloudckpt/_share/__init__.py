"""Read once what several ranks load: the manifest, and the bytes that ranks of one machine want in common.

The package takes the byte ranges that each rank wants. It gives the segments that one rank reads and publishes in
shared memory, and those that other ranks copy from there. `cloudckpt.reader` and `_pipeline` call it.
"""
