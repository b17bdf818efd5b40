"""`nkw peer`: a folder and prompts through one of the vendor's own inference libraries, compared with ours."""
