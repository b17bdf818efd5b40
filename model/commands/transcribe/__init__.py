"""`nkw transcribe`: a recording in windows, each through an encoder and a decoder."""
