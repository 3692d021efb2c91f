"""Builds the reports, tables and charts of runs and evaluations."""
