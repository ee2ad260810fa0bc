"""Execution on torch.distributed: views, lanes, communication, one-sided access; `bind` joins them."""
