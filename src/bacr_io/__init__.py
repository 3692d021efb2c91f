"""Input and output of all commands: one-line errors, file readers and writers, command lines.

Every other package may import this package, which uses Python's standard library only.

`bacr_io.errors` defines `UserError`, the exception for invalid input. `bacr_io.files` reads
untrusted files and writes files atomically. `bacr_io.command` parses command lines and turns errors
into one line and an exit code.
"""
