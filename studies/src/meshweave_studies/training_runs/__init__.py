"""Published training runs beside predicted ones: `meshweave reproduce published`."""
