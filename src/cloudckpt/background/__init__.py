"""Saves beside training.

Takes a state dict and a writer, copies the state dict, saves the copy in a thread or by torch's background process, and
gives a handle. `cloudckpt.api` calls it; the manager asks it for the save in flight.
"""
