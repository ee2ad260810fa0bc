"""Pipelines of torch modules. In the order of a call of `meshweave.pipeline`:

file               what it does
-----------------  ---------------------------------------------------------------------------------------
`pipeline`         `meshweave.pipeline`: arguments, binding, `step` and `evaluate`
`plan`             schedules by name or file, meshes, options
`binding`          the program, bound to the modules
`profile`          runs a stage on the meta device: shapes, FLOPs, and what autograd keeps
`run_again`        random states and buffers, for a forward that runs again
`saved_memory`     counts the bytes that autograd keeps, at any moment
`stage_problem`    profiles of all stages, exchanged between ranks, as a `PipelineProblem`
`stage_functions`  the parts of a stage as functions of a program's calls
`stage_words`      what ranks of a stage compare in the first step that trains
`gradients`        gradients of parameters as one vector, for stages with several data-parallel ranks
`tied`             the table that embedding and head share, on the first and the last stage
`parallel_stage`   `ParallelStage`: layers of a parallelised model as a stage
`torch_runtime`    schedules of ours in torch's own runtime, with a trace
"""
