"""What a run leaves on disk and says while it goes on."""
