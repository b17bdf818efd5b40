"""`nkw transcribe`: transcribes the windows of a recording with an encoder and a decoder."""
