"""One call of a save or a load, from its arguments to its errors, in whichever thread."""
