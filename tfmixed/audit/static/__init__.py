"""What can be found without running a model, one kind of finding a module."""
