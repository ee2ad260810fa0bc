"""Execution on `torch.distributed`. In the order of a call of `bind` and of the bound program's `run`:

file            what it does
--------------  ------------------------------------------------------------------------------------------
`context`       what bound programs of a process share: process groups, lane threads, caches, deadlines
`groups`        which lanes share process groups, and between which ranks each group is formed
`compat`        the private names of torch, each behind one documented function
`call_order`    numbers the calls of ranks, so that a message of one is never taken for another's
`call_watch`    compares the calls of ranks that wait for long
`bind`          makes each op an action, and runs the whole
`buffers`       checks the tensors that are given, and allocates the rest
`analysis`      what binding derives from a program: ops of the rank, edges, channels, flags, each once
`views`         views as tensors that alias a buffer's memory; staging where strides do not fit
`compute`       local ops (products, copies, sums, calls) as actions
`wire`          dense tensors between ranks, posted receives and guarded waits
`comm`          messages, ring steps and collectives as actions over `wire`
`one_sided`     gets, puts, updates, fences and completion flags as actions over a remote memory
`issue`         how the actions are issued: a thread per lane, or one thread in one order
`lanes`         the threads of lanes, and what each op waits for in other lanes
`measure`       ranks that begin together, for timings
"""
