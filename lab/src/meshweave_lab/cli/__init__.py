"""The verbs `meshweave lab` and `meshweave bench`."""
