"""Results of a run as tables, bars, comparisons of two runs, plots and a page."""
