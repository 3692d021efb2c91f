"""Writes and reads the files of a run, and shows its progress."""
