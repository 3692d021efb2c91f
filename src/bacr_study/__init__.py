"""Runs the experiments of the paper: many methods, tasks and seeds, compared with each other."""
