"""Runs the experiments of the paper and compares methods across tasks and seeds."""
