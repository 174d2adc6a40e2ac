"""Pure planning: values in, values out. No store, no torch, no clock."""
