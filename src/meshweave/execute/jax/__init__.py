"""Execution on jax: a program becomes the source of a function that `jax.shard_map` runs on every device.

file            what it does
--------------  ------------------------------------------------------------------------------------------
`source`        the whole source, from the program: inputs and outputs, and what one device runs
`op_lines`      ops as lines
`statements`    loops and conditions as lines
`rolled_loops`  loops as `lax.fori_loop`
`rank_steps`    ops of programs that are written per rank, as lines that all devices run
`views`         what is read and written of buffers as slices, blocks and lists of positions
`variables`     which buffers are values, or lists of parts, rather than arrays that are written into
`turns`         numbers of the template as expressions, or tables
`devices`       the jax mesh, and which of its axes an axis of the program is
`operations`    the functions that the source is made of; they are copied into it
`run`           executes the source on devices
`tpu`           TPUs that XLA's compiler can compile for on any machine

Only `operations`, `run` and `tpu_devices` import jax; printing a source needs none.
"""
