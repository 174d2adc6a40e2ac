"""How the ranks of a job wait for one another: only for as long as those that they wait for are alive."""
