"""Mixed precision for Keras on TensorFlow: measured, guarded, visible."""
