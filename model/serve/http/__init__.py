"""The HTTP server: its app, limits of connections, API keys, origins, and the page."""
