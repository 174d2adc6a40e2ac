"""What is made of a run's results: tables, bars, comparisons of two runs, plots and a page."""
