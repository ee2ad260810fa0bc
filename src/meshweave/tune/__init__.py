"""Search: which algorithm, mesh shape and slice counts a model should use on a cluster."""

from meshweave.tune.plan import Plan
from meshweave.tune.plan_file import load_plan
from meshweave.tune.product import TunedProduct, tune_product
from meshweave.tune.search import plan_model

__all__ = ["Plan", "TunedProduct", "load_plan", "plan_model", "tune_product"]
