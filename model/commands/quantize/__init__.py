"""`nkw quantize`: writes a folder whose linear weights have fewer bits, and reports what it costs."""
