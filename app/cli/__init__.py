"""The command line: arguments, help, progress and first lines."""
