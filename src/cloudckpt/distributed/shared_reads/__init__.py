"""Read once on each machine what several of its ranks want. Takes ranges of each rank, gives segments to its load."""
