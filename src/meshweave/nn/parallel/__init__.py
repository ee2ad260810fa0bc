"""Plans in a user's model: layers of torch whose products, norms and losses run the programs of a strategy.

strategy        what each dim of a device mesh does, from a plan
parameters      whole tensors to DTensors and back to what a rank has
programs        the programs of the sites of a layer, bound
ops, moves, ring   torch ops that run them
units           heads that ranks do not share evenly
linear, norm, attention, feed_forward, embedding, loss, dropout   modules and functions between them
structure       which modules of a model are which
model           `parallelize`
"""
