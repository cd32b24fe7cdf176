"""Training of the small chat model. Nothing here is imported by the serving programs."""
