"""Administration: information about the server, abort, cache, trace level, drain."""
