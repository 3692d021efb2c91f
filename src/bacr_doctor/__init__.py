"""Is this machine fit for a run: every path of the library, tried small, before one is started."""
