"""The HTTP server: connections, middleware, bodies, routes, keys, errors and streams. It knows no API.

hypercorn.py, http1.py, http2.py     the server and its connections; startup_lines.py, progress.py: the terminal
middleware.py        the outermost layer of a request: auth.py (keys), browser_policy.py (hosts, CORS), access log
exchange.py          Exchange: one request with its response, streams and end; every handler gets one
request_body.py      receives a body; upload_budget.py: bytes of all bodies    query.py: values of a query
decoding.py          a body as a struct; validation_errors.py: wrong fields, for clients
field_screen.py      fields that the struct has not; known_fields.py: those of other APIs
routes.py            the route table; path_suggestions.py: answers 404    openapi.py, openapi_page.py: describe it
service.py           Service: what handlers share: engine, arguments, model names
sse.py               streams as responses; merged_streams.py: several as one    dialect.py, errors.py: errors by API
custom_labels.py     clients' labels for metrics    ids.py: ids of requests    logs.py: the log handler    version.py
warmup.py            requests before the first client's    single_process.py: refuses several server processes
background.py        requests for which no client waits    garbage_collection.py: full collections while idle
"""
