"""Plans in a user's model: layers of torch whose products, norms and losses run the programs of a strategy.

strategy        what each dim of a device mesh does, from a plan
parameters      whole tensors to DTensors and back to what a rank has
programs        the programs of the sites of a layer, bound
ops, moves, ring   torch ops that run them
units           heads that ranks do not share evenly
linear, norm, attention, feed_forward, embedding, loss, dropout   modules and functions between them
structure       which modules of a model are which
known           what runs a model: its own code, or layers by the names of modules
takeable        what must not have been done to a model before
rotary          cosines and sines by the model's own module
features        what transformers offers and a parallelised model has not
model           `parallelize`
"""
