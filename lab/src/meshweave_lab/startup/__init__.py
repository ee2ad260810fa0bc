"""A folder for the front of PYTHONPATH: its `sitecustomize` paces whatever program runs."""
