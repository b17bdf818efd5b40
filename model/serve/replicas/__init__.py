"""Several engines behind one server: their processes, and the routing of requests to them."""
