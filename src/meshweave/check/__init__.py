"""Proofs and runs of planned products and of any program, on this machine.

`verify` answers whether programs compute what they declare; `run` executes a layer of a plan on local processes,
checks it and measures it.
"""

from meshweave.check.runner import MeasuredProduct, RunReport, run
from meshweave.check.verifier import Verification, VerifyReport, verify

__all__ = ["MeasuredProduct", "RunReport", "Verification", "VerifyReport", "run", "verify"]
