"""Which manifest counts, and how a new one comes to count. Knows no torch."""
