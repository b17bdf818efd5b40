"""The planner `nkw plan`: what a model needs and what it will do on a chip, from its config.json alone."""
