"""`nkw traffic`: what a stream of users would see, on the clock of predicted steps."""
