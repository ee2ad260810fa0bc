"""`python -m meshweave`."""

from meshweave.cli import main

main()
