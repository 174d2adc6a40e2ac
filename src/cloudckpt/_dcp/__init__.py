"""The planners that torch's DCP calls: its own, faster, and with errors that say what to do."""
