"""HTTP server: its application, limits of connections, API keys, origins, and the page."""
