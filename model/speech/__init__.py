"""Speech as a model hears it: recordings, their windows and spectra, and the rules by which they are written down."""
