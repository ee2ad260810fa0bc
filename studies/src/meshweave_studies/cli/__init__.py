"""The verbs `meshweave reproduce` and `meshweave compile`."""
