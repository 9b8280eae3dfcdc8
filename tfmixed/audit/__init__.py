"""What is wrong with a model in 16 bits: found by looking and by measuring."""
