"""`nkw serve`: the engine behind OpenAI's HTTP routes. Of the engine it knows submit, stream, cancel and state."""
