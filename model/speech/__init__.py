"""Speech as a model takes it: recordings, their windows and spectra, and the rules of transcriptions."""
