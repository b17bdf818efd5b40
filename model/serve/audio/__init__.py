"""The routes `/v1/audio/…`: recordings of clients, written down by a speech model."""
