"""What a save or load does, while it does it: seconds by phase, a timeline, and whoever watches."""
