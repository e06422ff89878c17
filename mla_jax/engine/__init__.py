"""Who is served: on the host, in plain integers."""
