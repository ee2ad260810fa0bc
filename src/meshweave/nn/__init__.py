"""From plans to torch. Import `meshweave.matmul2d`; this package itself imports no torch."""
