"""`nkw peer`: compares our tokens and logits with an inference library of the vendor."""
