"""Routes `/v1/audio/…`: recordings of clients, transcribed by a speech model."""
