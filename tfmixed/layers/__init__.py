"""Twins of layers of Keras that are right in 16 bits."""
