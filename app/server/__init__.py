"""The HTTP server: connections, middleware, bodies, routes, keys, errors and streams."""
