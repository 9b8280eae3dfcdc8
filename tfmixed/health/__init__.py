"""What 16 bits do to the gradients of a model, measured while it trains."""
