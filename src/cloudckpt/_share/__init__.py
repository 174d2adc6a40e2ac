"""What several ranks need, read by one of them and handed on to the others."""
