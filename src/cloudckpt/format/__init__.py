"""The manifest and the data objects as bytes: model, codec, validation, building.

Takes values and bytes, and gives values; knows no store. `commit`, `pipeline` and `inspect` call this package.
"""
