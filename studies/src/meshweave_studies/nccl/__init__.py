"""Bus bandwidths that nccl-tests printed across hosts, beside those of the prices (`meshweave reproduce nccl`)."""
