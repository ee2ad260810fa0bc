"""Proofs and runs of planned products and of any program, on this machine.

`verify` answers whether programs compute what they declare; `run` executes a layer of a plan on local processes,
checks it and measures it.
"""

from meshweave.check.runner import MeasuredProduct as MeasuredProduct
from meshweave.check.runner import RunReport as RunReport
from meshweave.check.runner import run as run
from meshweave.check.verifier import Verification as Verification
from meshweave.check.verifier import VerifyReport as VerifyReport
from meshweave.check.verifier import verify as verify
