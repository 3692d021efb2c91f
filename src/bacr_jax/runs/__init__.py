"""Reads and writes the files of a run, and displays its progress."""
