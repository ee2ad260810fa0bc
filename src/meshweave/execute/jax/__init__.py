"""Execution on jax: a program becomes the source of a function that `jax.shard_map` runs on every device.

file          what it does
------------  ------------------------------------------------------------------------------------------
`source`      the whole source, from the program: inputs and outputs, and what one device runs
`statements`  ops, loops and conditions as lines
`views`       what is read and written of buffers as slices, blocks and lists of positions
`variables`   which buffers are values, or lists of parts, rather than arrays that are written into
`turns`       numbers of the template as expressions, or tables
`devices`     the jax mesh, and which of its axes an axis of the program is
`operations`  the functions that the source is made of; they are copied into it
`run`         executes the source on devices
`lowered`     the collectives of a lowered module, beside those of the program

Only `operations` and `run` import jax; printing a source needs none.
"""
