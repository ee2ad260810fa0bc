"""Plans in a user's model: layers of torch whose products, norms and losses run the programs of a strategy.

parallelize     the function `parallelize`
plans, expert_axes, strategy   from what a user gives as a plan to what each dim of a device mesh does
known, structure, takeable     which models are taken, which of their modules are which, and what is refused
model, block    a model of plain torch on ranks, and a layer of it; `meshweave.nn.hosted` has those of transformers
linear, norm, attention, embedding, tied, loss, dropout, rotary   modules of a layer and of the ends of a model
parameters, units      which part of a whole tensor a rank keeps, as a DTensor
buckets, uses, parameter_nodes, numbered_sum   parameters that are gathered, and gradients summed, together
programs        the programs of the sites of a layer, bound
ops, moves, ring       torch ops that run them
agreed, same_model, step_agreement   what ranks compare, before a model is replaced and in each call
optimizers, local_steps          steps of optimizers
trials, trial_memory, planned_here, machine_here, timed_here   plan "auto": plans are measured
features        what transformers and torch offer and a parallelised model refuses
"""
