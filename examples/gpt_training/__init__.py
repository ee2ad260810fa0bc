"""Train a small GPT or Llama; `examples/train_gpt.py` is the command.

file        what it has
----------  ------------------------------------------------------------------------------------------
`models`    the two models, written as one writes them for one process, and how one is cut into stages
`text`      bytes of a text as batches, with a position to go on from
`layout`    degrees of parallelism, by hand or from a plan, as a device mesh
`trainer`   the training step on a rank: stages, pipeline, optimizer, checkpoints
`live`      the live line, TensorBoard events, and the summary
`predict`   what a step should take, from what this machine is measured to do
"""
