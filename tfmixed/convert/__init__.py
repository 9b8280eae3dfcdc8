"""Making a model anew with other dtypes: the parts of `prepare`."""
