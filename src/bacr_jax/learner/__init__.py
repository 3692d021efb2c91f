"""Objective, optimizer and update."""
